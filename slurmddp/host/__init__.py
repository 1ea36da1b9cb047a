"""Handle one machine: its processes, signals, control groups, processors, addresses and ports."""
