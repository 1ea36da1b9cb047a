"""Rank programs of test_strategies: steps that report their weights, gradients or exchanges."""

from __future__ import annotations

import copy
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.utils.checkpoint import checkpoint

from slurmddp.checkpoint.state.shards import whole
from slurmddp.errors import CheckpointError, ConfigError, SlurmddpError
from slurmddp.strategies import Strategy, build
from slurmddp.strategies.ddp import fix_bucket_layout
from slurmddp.strategies.ring import Ring
from slurmddp.training.distributon import Distributon
from support.distributed.rank_jobs import Net, batch_of, step_on, weights


def replicas_after_each_step() -> list[dict[str, torch.Tensor]]:
    """Train on different data from different first weights; return this rank's weights after every step."""
    with Distributon() as d:
        d.launch()
        torch.manual_seed(d.rank)
        model = d.setup_model(Net())
        optimizer = d.setup_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        history = [weights(d.unwrap(model))]
        for step in range(4):
            step_on(model, optimizer, *batch_of(100 * step + d.rank))
            history.append(weights(d.unwrap(model)))

        return history


def contract(name: str) -> dict[str, Any]:
    """Train on this rank's part of common batches by a strategy; return the values that tests compare."""
    with Distributon(strategy=name, seed=5) as d:
        d.launch()
        net = Net()
        model = d.setup_model(net)
        optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        def part(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = batch_of(seed, 8)
            share = slice(d.rank * 8 // d.world_size, (d.rank + 1) * 8 // d.world_size)
            return x[share], y[share]

        def pass_over(seed: int, accumulate: int = 1) -> None:
            x, y = part(seed)
            d.backward(nn.functional.cross_entropy(model(x), y), accumulate=accumulate)

        def gradients() -> dict[str, torch.Tensor]:
            return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}

        results: dict[str, Any] = {"unwrapped": d.unwrap(model) is net}
        pass_over(1)
        results["mean"] = gradients()
        optimizer.zero_grad()
        with d.accumulating(model, last=False):
            pass_over(2, 2)
        local = gradients()["last.weight"]
        sums = d.all_gather(local)
        results["own part is local"] = d.world_size == 1 or not torch.equal(sums[0], sums[1])
        with d.accumulating(model, last=True):
            pass_over(3, 2)
        results["accumulated"] = gradients()
        optimizer.step()
        optimizer.zero_grad()

        for seed in range(4, 8):
            pass_over(seed)
            optimizer.step()
            optimizer.zero_grad()

        results["weights"] = weights(net)
        return results


def mean_gradient(size: int) -> dict[str, torch.Tensor]:
    """Return the gradients of this rank's part of a batch of 8, averaged over the ranks by the strategy."""
    with Distributon(seed=5) as d:
        d.launch()
        model = d.setup_model(Net())
        x, y = batch_of(1, 8)
        share = slice(d.rank * size, (d.rank + 1) * size)
        d.backward(nn.functional.cross_entropy(model(x[share]), y[share]))
        return {name: p.grad.clone() for name, p in d.unwrap(model).named_parameters() if p.grad is not None}


def resumed_with_stock_ddp(fixed: bool) -> bool:
    """Return whether a run that resumes at step 3 ends with the weights of the undisturbed one."""
    with Distributon() as d:
        d.launch()

        def start() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
            torch.manual_seed(0)
            net = Net(width=96)
            wrapped = nn.parallel.DistributedDataParallel(net)
            if fixed:
                fix_bucket_layout(wrapped)
            return net, wrapped, torch.optim.AdamW(net.parameters(), lr=0.01)

        net, wrapped, optimizer = start()
        for step in range(8):
            if step == 3:
                again, again_wrapped, again_optimizer = start()
                again.load_state_dict(weights(net))
                again_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

            step_on(wrapped, optimizer, *batch_of(100 * step + d.rank))

        for step in range(3, 8):
            step_on(again_wrapped, again_optimizer, *batch_of(100 * step + d.rank))
        return all(
            torch.equal(a, b) for a, b in zip(weights(net).values(), weights(again).values(), strict=True)
        )


def layout_leaves_no_trace() -> dict[str, bool]:
    with Distributon() as d:
        d.launch()
        torch.manual_seed(d.rank)
        net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
        calls: list[int] = []
        net.register_forward_hook(lambda *_: calls.append(1))
        with torch.no_grad():
            for value in net.state_dict().values():
                torch.distributed.broadcast(value, 0)

        before = weights(net)
        random = torch.get_rng_state()
        model = build("ddp").wrap(net, d.device)
        after = weights(net)
        return {
            "weights and buffers": all(torch.equal(before[name], after[name]) for name in before),
            "random": torch.equal(random, torch.get_rng_state()),
            "gradients": all(p.grad is None for p in net.parameters()),
            "hooks": not calls,
            "model": build("ddp").unwrap(model) is net,
        }


def layout_with_device_ids() -> bool:
    """Fix the layout of a model whose arguments torch moves, as on GPUs; return whether it then trains."""
    with Distributon() as d:
        d.launch()
        net = Net()
        model = nn.parallel.DistributedDataParallel(net)
        before = weights(net)
        # torch refuses `device_ids` of a model on CPUs, but its forward passes would be the same.
        model.device_ids = [0]
        fix_bucket_layout(model)
        model.device_ids = []
        step_on(model, torch.optim.SGD(model.parameters(), lr=0.1), *batch_of(d.rank))
        return not torch.equal(before["last.weight"], net.last.weight)


def layout_runs_no_hooks() -> dict[str, bool]:
    """Wrap a model whose hooks step its parameters; return whether they ran in the wrap, and run later."""
    with Distributon() as d:
        d.launch()
        torch.manual_seed(0)
        net = Net()
        optimizers = {p: torch.optim.AdamW([p], lr=0.01, weight_decay=0.1) for p in net.parameters()}
        calls: list[str] = []

        def step(parameter: torch.Tensor) -> None:
            calls.append("accumulated")
            optimizers[parameter].step()

        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        net.first.weight.register_hook(lambda gradient: calls.append("tensor"))
        torch.autograd.graph.register_multi_grad_hook(list(net.parameters()), lambda _: calls.append("all"))
        net.register_full_backward_hook(lambda *_: calls.append("module"))
        before = weights(net)
        model = build("ddp").wrap(net, d.device)
        moved = [name for name, value in weights(net).items() if not torch.equal(value, before[name])]
        results = {
            "weights": not moved,
            "states": not any(optimizer.state for optimizer in optimizers.values()),
            "hooks": not calls,
        }
        x, y = batch_of(0)
        nn.functional.cross_entropy(model(x), y).backward()
        results["later"] = set(calls) == {"accumulated", "tensor", "all", "module"}
        results["stepped"] = all(optimizer.state for optimizer in optimizers.values())
        return results


def exchanges(steps: int, parts: int) -> int:
    """Return how many times gradients were exchanged in `steps` steps of `parts` backward passes."""
    with Distributon(seed=0) as d:
        d.launch()
        model = d.setup_model(Net())
        counted: list[int] = []

        def hook(state, bucket):
            counted.append(1)
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        model.register_comm_hook(None, hook)  # type: ignore[operator]
        optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        for _ in range(steps):
            for part in range(parts):
                with d.accumulating(model, last=part == parts - 1):
                    x, y = batch_of(part)
                    d.backward(nn.functional.cross_entropy(model(x), y), accumulate=parts)

            optimizer.step()
            optimizer.zero_grad()

        return len(counted)


def bucket_bytes(size_mb: float) -> int:
    with Distributon(strategy=build("ddp", bucket_mb=size_mb)) as d:
        return d.launch().setup_model(Net()).bucket_bytes_cap


def error_of_setup(strategy: str, trains: bool) -> str:
    with Distributon(strategy=strategy) as d:
        try:
            d.launch().setup_model(Net().requires_grad_(trains))
        except SlurmddpError as error:
            return str(error)

    return ""


def _steps(d: Distributon, steps: range, root: Path, save_at: int = 0) -> Any:
    """Train on this rank's half of common batches; load before the first step if it is not step 0."""
    d.seed_everything(5)
    net = Net(width=48)
    model = d.setup_model(net)
    first, *others = model.parameters()
    groups = [{"params": others}, {"params": [first], "weight_decay": 0.5}]
    optimizer = d.setup_optimizer(torch.optim.AdamW(groups, lr=0.01))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if steps.start:
        assert d.load(objects, root=root) == steps.start
    losses = []
    for step in steps:
        x, y = batch_of(step, 8, d.device)
        samples = slice(d.rank * 8 // d.world_size, (d.rank + 1) * 8 // d.world_size)
        loss = nn.functional.cross_entropy(model(x[samples]), y[samples])
        d.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        if step + 1 == save_at:
            d.save(save_at, objects, root=root)

    local = getattr(optimizer, "optim", optimizer)
    if local is not optimizer:
        with pytest.raises(RuntimeError, match="has not been consolidated"):  # The state of the save is old.
            optimizer.state_dict()

    share = sum(part.numel() for state in local.state.values() for part in state.values())
    return weights(net), losses, share


def _built(options: dict[str, Any]) -> Strategy:
    """Return the strategy of `name`, or ddp, with the other options."""
    return build(
        options.get("name", "ddp"), **{key: value for key, value in options.items() if key != "name"}
    )


def trained_with(options: dict[str, Any], root: str) -> dict[str, Any]:
    """Train 10 steps, save after step 6; return weights, losses and the size of this rank's optimizer."""
    with Distributon(strategy=_built(options)) as d:
        d.launch()
        whole, losses, share = _steps(d, range(10), Path(root), save_at=6)

    return {"whole": whole, "losses": losses, "share": share}


def resumed_with(options: dict[str, Any], root: str) -> dict[str, torch.Tensor]:
    """Train from the checkpoint of step 6 in new processes, and return the weights."""
    with Distributon(strategy=_built(options)) as d:
        d.launch()
        return _steps(d, range(6, 10), Path(root))[0]


class Reused(nn.Module):
    """Model with a checkpointed layer that runs twice, and an unused layer.

    DDP needs a static graph for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=True))
        logits: torch.Tensor = self.last(x)
        return logits


def reused_layer(static_graph: bool) -> str:
    """Train three steps of `Reused`; return the error, or an empty text."""
    with Distributon(strategy=build("ddp", static_graph=static_graph), seed=1) as d:
        d.launch()
        model = d.setup_model(Reused())
        optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        if static_graph:
            with torch.no_grad():
                model(batch_of(0)[0])  # torch learns nothing about the graph from it.
            with pytest.raises(ConfigError, match="several batches per step"):
                d.accumulating(model, last=False)

        try:
            for step in range(3):
                x, y = batch_of(100 * step + d.rank)
                step_on(model, optimizer, x.requires_grad_(), y)
        except RuntimeError as error:
            return str(error)

        return ""


def local_steps(options: dict[str, Any], steps: int, width: int) -> dict[str, Any]:
    """Train a linear model with plain SGD on this rank's data; return the weights of all ranks by step."""
    with Distributon(strategy=_built(options), seed=3) as d:
        d.launch()
        torch.manual_seed(d.rank)
        model = d.setup_model(nn.Linear(width, 1))
        optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        sent: list[int] = []
        all_reduce = torch.distributed.all_reduce

        def counted(tensor: torch.Tensor) -> None:
            sent.append(tensor.numel())
            all_reduce(tensor)

        history = [torch.nn.utils.parameters_to_vector(model.parameters()).tolist()]
        data = []
        torch.distributed.all_reduce = counted

        try:
            for step in range(steps):
                x = torch.randn(4, width, generator=torch.Generator().manual_seed(10 * step + d.rank))
                data.append(x.tolist())
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                history.append(torch.nn.utils.parameters_to_vector(model.parameters()).tolist())
        finally:
            torch.distributed.all_reduce = all_reduce

        return {"weights": history, "data": data, "sent": sent}


def two_models(options: dict[str, Any]) -> list[bool]:
    """Step two models in turn on this rank's data; return after each pair of steps if all replicas agree."""
    with Distributon(strategy=_built(options), seed=3) as d:
        d.launch()
        models = d.setup_model(nn.Linear(4, 1), nn.Linear(4, 1))
        optimizers = [d.setup_optimizer(torch.optim.SGD(each.parameters(), lr=0.1)) for each in models]
        agree = []

        for step in range(4):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + d.rank))
            for model, optimizer in zip(models, optimizers, strict=True):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

            flat = torch.cat(
                [parameter.detach().flatten() for model in models for parameter in model.parameters()]
            )
            agree.append(all(torch.equal(flat, other) for other in d.all_gather(flat)))

        return agree


def one_optimizer_of_two_models(options: dict[str, Any], root: str) -> dict[str, bool]:
    """Train two models by one optimizer; return whether a load repeats the steps, and averages are complete.

    An infinite gradient on rank 1 lets only this rank skip a step whose end averages the weights.
    """
    with Distributon(strategy=_built(options), precision="fp16", seed=3) as d:
        d.launch()
        models = d.setup_model(nn.Linear(4, 4), nn.Linear(4, 1))
        trained = [parameter for model in models for parameter in model.parameters()]
        optimizer = d.setup_optimizer(torch.optim.Adam(trained, lr=0.1))
        objects = {"first": models[0], "second": models[1], "optimizer": optimizer}

        def train(steps: range) -> torch.Tensor:
            for step in steps:
                x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + d.rank))
                loss = models[1](models[0](x)).square().mean()
                d.backward(loss * torch.inf if (step, d.rank) == (4, 1) else loss)
                optimizer.step()
                optimizer.zero_grad()

            return nn.utils.parameters_to_vector(trained).detach()

        train(range(3))
        d.save(3, objects, root=root)
        averaged = train(range(3, 5))
        whole = train(range(5, 6))
        d.load(objects, root=root)
        return {
            "averaged": all(torch.equal(averaged, other) for other in d.all_gather(averaged)),
            "apart": not all(torch.equal(whole, other) for other in d.all_gather(whole)),
            "repeated": torch.equal(train(range(3, 6)), whole),
        }


def saved_at_step_0(options: dict[str, Any], root: str) -> None:
    """Take a step, and save it as step 0."""
    with Distributon(strategy=_built(options), seed=4) as d:
        d.launch()
        model = d.setup_model(Net(width=12))
        optimizer = d.setup_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        step_on(model, optimizer, *batch_of(d.rank))
        d.save(0, model=model, optimizer=optimizer, root=root)


def repeated_after_a_load(options: dict[str, Any], root: str, saves: bool = True) -> bool:
    """Load step 0 and train, twice; return whether the results are equal. With `saves`, save step 0 first."""
    with Distributon(strategy=_built(options), seed=3) as d:
        d.launch()
        model = d.setup_model(Net(width=12))
        optimizer = d.setup_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        ends = []
        if saves:
            d.save(0, model=model, optimizer=optimizer, root=root)

        for _ in range(2):
            d.load(model=model, optimizer=optimizer, root=root, step=0)
            for step in range(5):
                step_on(model, optimizer, *batch_of(10 * step + d.rank))
            end = nn.utils.parameters_to_vector(model.parameters()).tolist()
            ends.append((end, str(d._strategy.state_dict())))  # type: ignore[attr-defined]

        return ends[0] == ends[1]


def repeated_after_loads(options: dict[str, Any], roots: list[str]) -> list[bool]:
    """Return the result of `repeated_after_a_load` for checkpoints that exist, each with a new strategy."""
    return [repeated_after_a_load(options, root, saves=False) for root in roots]


class OnRankZero(Ring):
    """A strategy with a state on rank 0 only."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"value": 7} if torch.distributed.get_rank() == 0 else {}

    def reset(self) -> None:
        self.calls.append("reset")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append(state)


def loaded_on_rank_zero(root: str) -> list[Any]:
    """Save and load with `OnRankZero`; return the methods of the strategy that the load called."""
    strategy = OnRankZero()
    with Distributon(strategy=strategy).launch() as d:
        model = d.setup_model(Net())
        d.save(1, root=root, model=model)
        d.load(root=root, model=model)

    return strategy.calls


def gradients_that_nobody_averages() -> list[str]:
    """Add a parameter to a wrapped model, then unfreeze one; return the errors of the two steps."""
    errors = []
    with Distributon() as d:
        d.launch()
        net = nn.ParameterDict({"whole": torch.ones(2), "frozen": torch.ones(2)})
        net["complex"] = torch.ones(2, dtype=torch.complex64)
        net["frozen"].requires_grad_(False)
        d.setup_model(net)
        optimizer = d.setup_optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        optimizer.step()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})

        for trained in (optimizer.param_groups[1]["params"][0], net["frozen"]):
            optimizer.zero_grad()
            trained.requires_grad_().sum().backward()
            with pytest.raises(ConfigError) as refused:
                optimizer.step()
            errors.append(str(refused.value))

    return errors


def groups_added_later(options: dict[str, Any]) -> bool:
    """Unfreeze a second model after two steps, by an added group; return whether all ranks train it."""
    with Distributon(strategy=_built(options), seed=3) as d:
        d.launch()
        first, second = d.setup_model(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)))
        optimizer = d.setup_optimizer(torch.optim.SGD(first.parameters(), lr=0.1))
        before = second[0].weight.detach().clone()

        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": list(second.parameters())})
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + d.rank))
            second(first(x)).square().mean().backward()
            optimizer.step()
            first.zero_grad()
            second.zero_grad()

        kept = [*first.state_dict().values(), *second.state_dict().values()]
        alike = all(torch.equal(value, other) for value in kept for other in d.all_gather(value))
        return alike and not torch.equal(second[0].weight, before)


class Words(nn.Module):
    """An embedding with sparse gradients, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 5, sparse=True)
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.last(self.words(x).mean(1))
        return logits


def sparse_gradients(options: dict[str, Any], backend: str = "gloo") -> dict[str, torch.Tensor] | str:
    """Train `Words` on this rank's part of common batches; return the weights, or the error of a strategy."""
    with Distributon(strategy=_built(options), seed=3, backend=backend) as d:
        d.launch()
        net = Words()
        try:
            model = d.setup_model(net)
        except ConfigError as error:
            return str(error)

        optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            x = torch.randint(10, (8, 4), generator=torch.Generator().manual_seed(step))
            model(x.chunk(d.world_size)[d.rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return weights(net)


def timeouts_of_groups(options: dict[str, Any]) -> set[timedelta]:
    """Return the time-outs of all process groups under a strategy."""
    with Distributon(strategy=_built(options), collective_timeout_s=777) as d:
        d.launch()
        d.setup_model(Net())
        groups = [group._get_backend(torch.device("cpu")) for group in distributed_c10d._world.pg_map]
        return {group.options._timeout for group in groups}


def error_of_a_parameter(parameter: torch.Tensor) -> str:
    """Return the error of strategy fsdp for a model with this parameter."""
    with Distributon(strategy="fsdp") as d:
        d.launch()
        with pytest.raises(ConfigError) as refused:
            d.setup_model(nn.ParameterDict({"one": nn.Parameter(parameter)}))
        return str(refused.value)


def loss_scales(root: str) -> list[float]:
    """Return this rank's loss scales: at a save after an infinite gradient on rank 1, and after a load."""
    with Distributon(strategy=build("local_sgd", every=8), precision="fp16").launch() as d:
        model = d.setup_model(nn.Linear(1, 1))
        optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        assert d._scaler is not None
        scales = []

        for overflows in (1, 0):
            d.backward(model(torch.ones(1, 1)).sum() * (torch.inf if d.rank == overflows else 0.0))
            optimizer.step()
            optimizer.zero_grad()
            scales.append(d._scaler.state_dict()["scale"])
            if overflows:
                d.save(1, root=root, model=model, optimizer=optimizer)

        d.load(root=root, model=model, optimizer=optimizer)
        return [*scales, d._scaler.state_dict()["scale"]]


def loads_that_do_not_fit(options: dict[str, Any], root: str) -> list[tuple[str, bool, bool]]:
    """Save two models, each with an optimizer; load with one optimizer, and with a second model of more rows.

    Returns:
        Of each load: the error of a strict one, whether it changed nothing, and whether a load that is not
        strict gives all ranks the model of rank 0.
    """
    results = []
    for optimizers, width in ((2, 2), (1, 2), (2, 3)):
        with Distributon(strategy=_built(options), seed=3) as d:
            d.launch()
            models = d.setup_model(nn.Linear(4, 1), nn.Linear(4, width))
            steps = [
                d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
                for model in models[:optimizers]
            ]
            for module, optimizer in zip(models, steps, strict=False):
                module(torch.full((1, 4), d.rank + 1.0)).square().mean().backward()
                optimizer.step()

            objects = {"first": models[0], "optimizer": steps[0]}
            if (optimizers, width) == (2, 2):
                d.save(1, objects, root=root)
                continue

            before = weights(models[0])
            with pytest.raises(CheckpointError) as refused:
                d.load(objects, root=root)
            kept = all(torch.equal(value, before[name]) for name, value in weights(models[0]).items())
            d.load(objects, root=root, strict=False)
            flat = nn.utils.parameters_to_vector(models[0].parameters()).detach()
            alike = all(torch.equal(flat, other) for other in d.all_gather(flat))
            results.append((str(refused.value), kept, alike))

    return results


def group_added_before_a_save(root: str) -> bool:
    """Save a DiLoCo training whose optimizer got a group after its first step; return whether it resumes."""
    ends = []
    for resumes in (False, True):
        with Distributon(strategy=build("diloco", every=2), seed=3) as d:
            d.launch()
            first, second = d.setup_model(nn.Linear(4, 4), nn.Linear(4, 1))
            optimizer = d.setup_optimizer(torch.optim.SGD(first.parameters(), lr=0.1))

            for step in range(7):
                if step == (0 if resumes else 2):
                    optimizer.add_param_group({"params": list(second.parameters())})
                objects = {"first": first, "second": second, "optimizer": optimizer}
                if step in (2, 5) and not resumes:
                    d.save(step, objects, root=root)
                if resumes and step in (0, 5):
                    d.load(objects, root=root, step=2 if step == 0 else 5)
                if resumes and step < 2:
                    continue

                x = torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * step + d.rank))
                second(first(x)).square().mean().backward()
                optimizer.step()
                first.zero_grad()
                second.zero_grad()

            ends.append([*weights(first).values(), *weights(second).values()])

    return all(torch.equal(value, other) for value, other in zip(*ends, strict=True))


def trained_by(optimizer: str, options: dict[str, Any], exact: bool = False) -> Any:
    """Train a model in float64 by a class of torch.optim; return its whole weights, or the refusal.

    Args:
        optimizer: the name of the class.
        options: the name of a strategy, by default ddp, and its options.
        exact: whether Muon orthogonalises in float64, instead of bfloat16.
    """
    with Distributon(strategy=_built(options)) as d, pytest.MonkeyPatch.context() as patch:
        d.launch()
        if exact:
            patch.setattr("torch.optim._muon._zeropower_via_newtonschulz", _orthogonalized)
        torch.manual_seed(0)
        layers = [nn.Linear(7, 11, bias=False), nn.Tanh(), nn.Linear(11, 5, bias=False)]
        net = nn.Sequential(*layers).double()
        model = d.setup_model(net)
        made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.05)

        try:
            made = d.setup_optimizer(made)
        except ConfigError as error:
            return str(error)

        for step in range(6):
            generator = torch.Generator().manual_seed(10 * step + d.rank)
            inputs = torch.randn(4, 7, generator=generator, dtype=torch.float64)
            d.backward(model(inputs).square().mean() * 10)
            made.step()
            made.zero_grad()

        return [whole(parameter).detach().clone() for parameter in net.parameters()]


def _orthogonalized(
    gradient: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return the result of Muon's iteration, in the dtype of the gradient."""
    a, b, c = coefficients
    is_tall = gradient.size(0) > gradient.size(1)
    matrix = gradient.T if is_tall else gradient
    matrix = matrix / matrix.norm().clamp(min=eps)
    for _ in range(steps):
        gram = matrix @ matrix.T
        matrix = a * matrix + (b * gram + c * gram @ gram) @ matrix

    return matrix.T if is_tall else matrix


def resharded_adagrad() -> str:
    """Return the refusal of an Adagrad that has taken a step, by the ZeRO optimizer."""
    with Distributon(strategy=build("ddp", zero_optimizer=True)) as d:
        d.launch()
        model = d.setup_model(nn.Linear(3, 2))
        optimizer = torch.optim.Adagrad(model.parameters())
        d.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
        with pytest.raises(ConfigError) as refused:
            d.setup_optimizer(optimizer)
        return str(refused.value)


def equal_under_other_settings(
    cases: list[tuple[dict[str, Any], dict[str, Any]]], root: str
) -> list[list[bool]]:
    """Return the results of `_equal_under_other_settings`, each with its own folder."""
    return [_equal_under_other_settings(*case, f"{root}/{number}") for number, case in enumerate(cases)]


def _equal_under_other_settings(before: dict[str, Any], after: dict[str, Any], root: str) -> list[bool]:
    """Train 5 steps and resume with another strategy; return after which steps the weights were equal.

    Training is in fp16, and rank 1 has an infinite gradient in the last step before the resume.
    """

    def train(options: dict[str, Any], steps: range) -> list[bool]:
        equal = []
        with Distributon(strategy=_built(options), precision="fp16", seed=2) as d:
            d.launch()
            net = Net(width=12)
            model = d.setup_model(net)
            optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            if steps.start:
                d.load(model=model, optimizer=optimizer, root=root)

            for step in steps:
                x, y = batch_of(10 * step + d.rank)
                factor = float("inf") if (d.rank, step) == (1, 4) else 1.0
                d.backward(nn.functional.cross_entropy(model(x), y) * factor)
                optimizer.step()
                optimizer.zero_grad()
                copies = d.all_gather(nn.utils.parameters_to_vector(net.parameters()).detach())
                equal.append(torch.equal(copies[0], copies[-1]))

            if not steps.start:
                d.save(steps.stop, model=model, optimizer=optimizer, root=root)

        return equal

    train(before, range(5))
    return train(after, range(5, 11))
