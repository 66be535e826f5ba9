"""Many training runs as one computation: replicas with their own data, seeds and hyper-parameters, trained together.

One step is traced through Pyro for one replica, with parameters and settings as its inputs; mapped over all replicas it
is one program, in which a layer of all replicas is one batched matrix product.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_dropout.engines.choose import HowCompiled, check_how_compiled, decided, left_out, step_size
from pyro_dropout.engines.engine import Solo, Step
from pyro_dropout.engines.torch_internals import tree_map
from pyro_dropout.errors import PyroDropoutError, RangeError, ShapeError, warn_caller
from pyro_dropout.generative.inputs import AnyInputs, check_inputs, check_pairs, inputs_of, named, takes_all
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.precision import Precision, check_precision, products_in
from pyro_dropout.generative.process_state import RUNNING, seeded
from pyro_dropout.guides.summary import note_training
from pyro_dropout.mathematics.checks import check_positive, check_seed
from pyro_dropout.protocols import Record
from pyro_dropout.training.batches import Batches
from pyro_dropout.training.checkpoints.fingerprint import told_loss, told_update
from pyro_dropout.training.checkpoints.posterior_file import settings_of, tensors_of
from pyro_dropout.training.checkpoints.tensor_file import digest
from pyro_dropout.training.checkpoints.training_checkpoint import Checkpoint, Keeper
from pyro_dropout.training.collapse import warn_of_replicas
from pyro_dropout.training.compile.functional import Arguments, Buffers, Loss, Parameters, make_gradients, make_step
from pyro_dropout.training.fleet.replicas import (
    Replica,
    build_replicas,
    check_frozen,
    check_one_function,
    finite_rows,
    over_replicas,
    rows_of,
    stacked,
)
from pyro_dropout.training.history import History
from pyro_dropout.training.laplace.laplace import as_points, finish_on
from pyro_dropout.training.loop import loop
from pyro_dropout.training.loss.elbo import ELBO
from pyro_dropout.training.loss.learned_widths import set_best_widths, widths_kept
from pyro_dropout.training.optimisers import Schedule, Update, chosen, clock
from pyro_dropout.training.preflight import (
    LARGEST_SEED,
    check_duration,
    check_gradients,
    check_how,
    check_targets,
    check_trained,
)
from pyro_dropout.training.training_run import TrainingRun, surroundings

_TRIED = 4  # points with which replicas are compared
Rate = float | Tensor | Sequence[float]  # a learning rate, or one for each replica


class FleetRun(TrainingRun):
    """The training of a fleet."""

    total: int  # steps that fit takes
    facts: Callable[[], Record]  # what must be the same when the training is resumed


class Fleet:
    """E replicas of a model and its guide, trained together.

    Replicas may differ in everything that is a number: their starting values, keep, τ, length-scales, learning rates,
    and the data points that they see. They must not differ in structure.

    Args:
        build: makes one replica, ``build(**setting)`` -> (model, guide).
        settings: what each replica is built with: {argument: one value for each replica}.
        progress: show a progress bar while replicas are built.

    Attributes:
        settings: the settings, one dict for each replica.

    Example:
        >>> import torch, pyro_dropout as pdrop
        >>> def build(seed, keep):
        ...     torch.manual_seed(seed)
        ...     net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1))
        ...     model = pdrop.BayesianNet(net, likelihood=pdrop.Gaussian(tau=25.0))
        ...     return model, pdrop.AutoDropout(model, keep=keep)
        >>> fleet = pdrop.Fleet(build, {"seed": [0, 1, 2], "keep": [0.8, 0.9, 0.95]})
        >>> x = torch.linspace(-1, 1, 64).unsqueeze(-1)
        >>> history = fleet.fit(x, x**2, steps=50, lr=0.01, compile=False, progress=False)
        >>> history.losses.shape
        torch.Size([50, 3])
        >>> model, guide = fleet[1]
        >>> guide.keep
        0.9
    """

    def __init__(
        self, build: Callable[..., object], settings: Mapping[str, Sequence[object]], *, progress: bool = False
    ) -> None:
        self.settings, self._replicas = build_replicas(build, settings, progress)

    def __len__(self) -> int:
        return len(self._replicas)

    def __getitem__(self, index: int) -> Replica:
        """Return one replica, (model, guide), with what it has learned so far."""
        return self._replicas[index]

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    def to(self, device: torch.device | str) -> "Fleet":
        """Move all replicas to a device."""
        for part in (part for pair in self for part in pair):
            part.to(device)
        return self

    def place(self) -> torch.device:
        """Return the device that the replicas are on."""
        tensors = (tensor for part in self[0] for tensor in (*part.parameters(), *part.buffers()))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def buffers(self) -> list[Tensor]:
        """Return the settings of all replicas, stacked, in the first one's order."""
        return stacked([Buffers(*pair).values for pair in self._replicas])

    def values(self, parameters: Parameters) -> list[Tensor]:
        """Return the parameters of all replicas, stacked, in the first one's order."""
        return stacked([[parameter.detach() for parameter in owned] for owned in self.owners(parameters)])

    def select(self, chosen: Sequence[int]) -> "Fleet":
        """Return a fleet of some of the replicas (the same objects), in the given order."""
        picked = [int(k) for k in chosen]
        if not picked or min(picked) < 0 or max(picked) >= len(self):
            raise RangeError(f"chosen must name replicas, from 0 to {len(self) - 1}; got {picked[:8]}.")
        part = object.__new__(Fleet)
        part.settings = [self.settings[k] for k in picked]
        part._replicas = [self._replicas[k] for k in picked]
        return part

    def fit(
        self,
        x: Any,
        y: Tensor,
        *,
        progress: bool = True,
        checkpoint: str | Path | Checkpoint | None = None,
        seed: int | None = None,
        **options: Any,
    ) -> History:
        """Train all replicas, each on its own rows of one data set.

        A replica whose loss becomes NaN or infinite is dropped: it keeps the parameters that it started with, a warning
        counts such replicas, and ``history.diverged`` names them.

        Args:
            x: inputs that all replicas draw from, (N, ...), or a dict or a tuple of them.
            y: targets.
            progress: show a progress bar.
            checkpoint: a folder for checkpoints, or a ``Checkpoint``; as in ``fit``, the same call resumes from it.
            seed: for weight draws and mini-batches; the random generators are left as they were.
            options: those of ``prepare``: ``steps`` or ``epochs``, ``indices``, ``batch_size``, ``lr``, ``optim``,
                ``schedule``, ``clip_norm``, ``loss``, ``compile``, ``precision``, ``device``.

        Returns:
            The history, with losses (steps, E).
        """
        check_seed(seed, 0, LARGEST_SEED)
        check_how(None, options.get("device"))
        place = torch.device(options.get("device") or self.place())
        with RUNNING, seeded(seed, place), ExitStack() as points:
            for pair in self:
                points.enter_context(as_points(*pair, options.get("loss")))
            run = self.prepare(x, y, **options)
            facts = run.facts() | {"seed": seed}
            keeper = None if checkpoint is None else Keeper(checkpoint, run, *self[0], facts, None)
            history = loop(run, run.total, progress, keeper=keeper)
            history.losses[-1:, ~finite_rows(run.values).cpu()] = torch.nan  # what the last step breaks after its loss
            rows = rows_of(inputs_of(x), options.get("indices"), len(self)).to(y.device)

            def data_of(k: int) -> tuple[AnyInputs, Tensor]:
                return inputs_of(x)[rows[k]], y[rows[k]]

            good = [k for k, bad in enumerate(history.diverged.tolist()) if not bad]
            for k, (model, guide) in ((k, self[k]) for k in good):
                finish_on(guide, ModelCall(model, data_of(k)), batch_size=options.get("batch_size"))
                note_training(guide, f"{history.summary}, in a fleet")
        warn_of_replicas(list(self), good, data_of)
        lost = int(history.diverged.sum())
        if lost:
            warn_caller(
                f"{lost} of {len(self)} replicas reached a loss that is not finite and were left behind; see"
                " history.diverged. Lower their learning rate, or clip gradients (clip_norm=...).",
            )
        return history

    def prepare(
        self,
        x: Any,
        y: Tensor,
        *,
        indices: Tensor | None = None,
        steps: int | None = None,
        epochs: int | None = None,
        batch_size: int | None = None,
        lr: Rate | None = None,
        optim: str | Update = "adam",
        schedule: Schedule | None = None,
        clip_norm: float | None = None,
        loss: Loss | None = None,
        compile: HowCompiled = "auto",
        precision: Precision = "float32",
        device: torch.device | str | None = None,
    ) -> FleetRun:
        """Return the training of all replicas, ready to start, for callers that take its steps themselves.

        ``run.advance(n)`` takes n steps, ``run.values`` holds the parameters of all replicas, stacked, in Pyro's
        order, and ``run.publish()`` puts them into the replicas. Data on the replicas' device is not copied: a
        step sees what x and y hold when it is taken, so a learner may refill them in place between steps.

        Args:
            x: inputs that all replicas draw from, (N, ...), or a dict or a tuple of them.
            y: targets.
            indices: (E, n), the rows that each replica trains on; all rows by default. All replicas have n points.
            steps: how many steps ``fit`` takes; or give ``epochs``.
            epochs: how often to go through the data.
            batch_size: points in a mini-batch; all n of them by default.
            lr: the learning rate, or one for each replica; an ``Update``'s own by default, and 0.001 for the others.
            optim: "adam", "adamw", "sgd", or an ``Update``.
            schedule: multiplies ``lr``, as in ``fit``; an ``Update`` has its own, and its own ``clip_norm``.
            clip_norm: the largest norm of a replica's gradient.
            loss: ``ELBO()`` by default.
            compile: "auto", "traced", True or False, as in ``fit``.
            precision: "float32", or "bf16", as in ``fit``.
            device: where to train; everything is moved there. By default, where the replicas are.

        Example:
            >>> import torch, pyro_dropout as pdrop
            >>> def build(seed):
            ...     torch.manual_seed(seed)
            ...     model = pdrop.BayesianNet(torch.nn.Linear(2, 1), likelihood=pdrop.Gaussian(tau=4.0))
            ...     return model, pdrop.AutoDropout(model)
            >>> fleet = pdrop.Fleet(build, {"seed": [0, 1]})
            >>> x, y = torch.zeros(4, 2), torch.zeros(4, 1)
            >>> run = fleet.prepare(x, y, steps=10, compile=False)
            >>> for _ in range(run.total):
            ...     _ = x.normal_()  # every step sees new data
            ...     _ = y.copy_(x[:, :1])
            ...     losses = run.advance(1)
            >>> [tuple(value.shape) for value in run.values], tuple(losses.shape)
            ([(2, 1, 2), (2, 1)], (1, 2))
        """
        check_gradients(*self[0])
        check_how_compiled(compile)
        check_precision(precision, self[0][0], device)
        check_duration(steps, epochs, batch_size)
        x = check_inputs(x, whole=takes_all(self[0][0]))
        check_pairs("x and y", x, y)
        if takes_all(self[0][0]):
            raise PyroDropoutError(
                "a fleet draws weights for each data point, but this network takes all its points at once"
                " (whole_batch=True). Train its replicas one by one with fit."
            )
        check_how(clip_norm, device, schedule=schedule, loss=loss, optim=optim)
        check_targets(self[0][0], x, y)
        rows = rows_of(x, indices, len(self))
        own = optim.lr if isinstance(optim, Update) else 1e-3
        rate = self.rates(own if lr is None else lr)
        update = chosen(optim, float(rate[0]), schedule, clip_norm)
        if update.optimiser is not None:
            raise PyroDropoutError(
                f"a fleet has its optimiser inside its step, and {update.name} would hold the parameters of one replica"
                " at most. Use 'adam', 'adamw', 'sgd' or an Update."
            )
        place = self.place() if device is None else device
        self.to(place)
        data = ModelCall(None, (x, y)).trainable().to(place)
        x, y = data.args
        rows = rows.to(place)
        points = rows.shape[1]
        batch = points if batch_size is None else min(batch_size, points)
        loss = ELBO() if loss is None else loss
        check_frozen(self._replicas, self.settings)
        parameters = Parameters(*self[0], loss, (x[rows[0, :batch]], y[rows[0, :batch]], points), {})
        check_trained(parameters.names, self[0][1])
        owners = self.owners(parameters)

        def write(values: list[Tensor]) -> None:
            for k, (owned, finite) in enumerate(zip(owners, finite_rows(values).tolist(), strict=True)):
                if finite:
                    for parameter, value in zip(owned, values, strict=True):
                        parameter.data = value[k]
                    set_best_widths(*self[k], (x[rows[k, :1]], y[rows[k, :1]], points))

        values, places, buffers = self.values(parameters), Buffers(*self[0]), self.buffers()
        rate = rate.to(clock(update.lr, values, 1)[1])

        @contextmanager
        def with_numbers_of(k: int) -> Iterator[None]:
            own = [[each[k] for each in tensors] for tensors in (values, buffers)]
            with parameters.replaced(own[0]), places.replaced(own[1]):
                yield

        some = rows[0, : min(batch, _TRIED)]
        check_one_function(self._replicas, self.settings, with_numbers_of, x[some], y[some])
        batches = None if batch == points else Batches(batch, rows)

        def call(x: AnyInputs, y: Tensor, index: Tensor) -> Arguments:
            return (x[index], y[index], points), {}

        total = steps if steps is not None else int(epochs or 0) * max(1, points // batch)
        solo = make_step(make_gradients(*self[0], loss, parameters, call), parameters, update)
        first, settings = [value[0] for value in values], [buffer[0] for buffer in buffers]
        how = decided(compile, total, len(self) * step_size(first, batch), rate.device)
        example = (first, update.start(first), rate.new_ones(()), rate[0], settings, x, y, rows[0, :batch])
        with products_in(precision), widths_kept():
            function = over_replicas(solo, example, (0, 0, None, 0, 0, None, None, 0), self[0])
            inputs = (buffers, x, y, *([rows] if batches is None else []))
            around = surroundings(values, update, inputs, batches) | {"lr": rate}
            step = Step(function, values, update.start(values), **around)
            shared = tree_map(lambda _: None, (x, y))
            step.solo = Solo(solo, example, (*example[:2], rate, rate, settings, *shared, rows))
            run = FleetRun(step, write=write, batches=batches, compile=how)
        run.why += left_out(compile, how, run.engine)
        run.total = total
        told = settings_of(*self[0])  # without prior widths that were found from data
        fixed = [name in told or "prior_scale/" not in name for name in places.names]
        run.facts = lambda: {
            **{name: digest(tensor) for name, tensor in {**named(x), "y": y, "indices": rows, "lr": rate}.items()},
            "settings": [digest(each) for each, stays in zip(self.buffers(), fixed, strict=True) if stays],
            "replicas": len(self),
            "batch": batch,
            "update": told_update(update),
            "loss": told_loss(loss, self[0][0]),
            **parameters.told,
            **({} if precision == "float32" else {"precision": precision}),
        }
        return run

    def __repr__(self) -> str:
        model, guide = self[0]
        return f"Fleet({len(self)} replicas of {type(model).__name__} with {type(guide).__name__})"

    def owners(self, parameters: Parameters) -> list[list[Tensor]]:
        """Return every replica's parameters, in the first one's order."""
        by_path = [tensors_of(*replica) for replica in self._replicas]
        paths = {id(parameter): path for path, parameter in by_path[0].items()}
        for name, value in parameters.by_name.items():
            if id(value) not in paths:
                raise PyroDropoutError(
                    f"parameter {name!r} is in Pyro's store and in no module, so replicas would share it; make the"
                    " model an nn.Module that owns it."
                )
        return [[owned[paths[id(value)]] for value in parameters.by_name.values()] for owned in by_path]

    def rates(self, lr: Rate) -> Tensor:
        """Return the learning rate of each replica, (E,); raise if they are not valid."""
        check_positive("lr", torch.as_tensor(lr) if isinstance(lr, list | tuple) else lr)
        rates = torch.as_tensor(lr, dtype=torch.float64)
        if rates.dim() > 1 or (rates.dim() == 1 and len(rates) != len(self)):
            raise ShapeError(f"lr must be a number, or one for each of {len(self)} replicas; got {tuple(rates.shape)}.")
        return rates.expand(len(self)).contiguous()
