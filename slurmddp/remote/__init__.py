"""Control workers that hold tensors from one script: `remote.workers(4)`, `x.dist_send(node=1)`, `z.fetch()`.

The modules build on each other in this order: `message_encoding` and `channel` (messages), `connection` (the
controller's end of a connection), `dispatch` (operations on remote tensors), `worker` and `collective` (the
worker's end), `controller` (start and end of the workers, collectives), `place` (factories, send, call,
module, events), and `job` (the processes of the workers).
"""

from collections.abc import Callable

import torch

from slurmddp.remote.connection import RemoteError, WorkerLostError
from slurmddp.remote.controller import Workers as workers
from slurmddp.remote.dispatch import RemoteTensor
from slurmddp.remote.place import Event as record_event
from slurmddp.remote.place import Placement as node
from slurmddp.remote.place import call, factory, module, send

__all__ = ["RemoteError", "RemoteTensor", "WorkerLostError", "call", "module", "node", "record_event", "send"]
__all__ += ["workers"]
torch.Tensor.dist_send = send  # type: ignore[attr-defined]


def __getattr__(name: str) -> Callable[..., torch.Tensor]:
    """Return torch's factory `name` with the argument `node`, as in `remote.zeros(3, node=1)`."""
    return factory(name)
