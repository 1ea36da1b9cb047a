// Let the search work in pages that are opened from a folder. A browser starts no worker from a file, so the
// worker's script runs in a hidden frame. By this file's name the plugin `offline` knows that nothing is missing.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.receive = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      frame.srcdoc =
        "<script>postMessage = (data) => frameElement.receive(data)</script>" + `<script src="${script}"></script>`;
      this.loaded = new Promise((resolve) => frame.addEventListener("load", resolve));
      this.frame = frame;
      document.body.append(frame);
    }

    async postMessage(data) {
      await this.loaded;
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
