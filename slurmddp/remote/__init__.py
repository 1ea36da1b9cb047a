"""One script controls, and workers hold the tensors: `remote.workers(4)`, `x.dist_send(node=1)`, `z.fetch()`.

The room reads from top to bottom: `message_encoding` and `channel` (messages), `connection` (the controller's
end of one worker), `dispatch` (operations on remote tensors), `worker` and `collective` (the worker's end),
`controller` (start and end of the workers, collectives), `place` (factories, send, call, module, events), and
`job` (the ranks of `slurmddp controller`).
"""

import torch

from slurmddp.remote.connection import RemoteError, WorkerLostError
from slurmddp.remote.controller import Workers as workers
from slurmddp.remote.dispatch import RemoteTensor
from slurmddp.remote.place import Placement as node
from slurmddp.remote.place import (
    arange,
    call,
    empty,
    eye,
    full,
    linspace,
    module,
    ones,
    rand,
    randint,
    randn,
    record_event,
    send,
    tensor,
    zeros,
)

torch.Tensor.dist_send = send  # type: ignore[attr-defined]

__all__ = [
    "RemoteError",
    "RemoteTensor",
    "WorkerLostError",
    "arange",
    "call",
    "empty",
    "eye",
    "full",
    "linspace",
    "module",
    "node",
    "ones",
    "rand",
    "randint",
    "randn",
    "record_event",
    "send",
    "tensor",
    "workers",
    "zeros",
]
