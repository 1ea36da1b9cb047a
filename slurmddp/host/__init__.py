"""One machine: processes, signals, control groups, processors, addresses and ports."""
