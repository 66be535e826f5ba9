"""The members of an ensemble: their parameters and settings, stacked, and one guide that can stand for any of them.

Members are numbered, and a member that has diverged has no number: its row is kept, and nothing reads it.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Self

import torch
from pyro import poutine
from torch import Tensor, nn

from pyro_dropout.errors import EmptyModelError, PyroDropoutError
from pyro_dropout.generative.model_call import ModelCall
from pyro_dropout.generative.process_state import RUNNING, forked, seed_generators
from pyro_dropout.generative.registration import tell_pyro
from pyro_dropout.generative.trial_run import modules_of
from pyro_dropout.guides.base import SiteGuide
from pyro_dropout.guides.points import Points, at_anchors, whole_prior
from pyro_dropout.guides.sites import GuideSite, near
from pyro_dropout.guides.summary import Summarised
from pyro_dropout.protocols import PyroModel

Start = Literal["anchor", "fresh", "module"]
Make = Callable[[Any], SiteGuide]  # makes a member's guide from a model


def tensors_of(guide: SiteGuide) -> dict[str, Tensor]:
    """Return the parameters and the settings of a guide, by name."""
    return {name: value.detach() for name, value in (*guide.named_parameters(), *guide.named_buffers())}


def started(model: PyroModel, make: Make, template: SiteGuide, start: Start, seed: int, met: bool) -> dict[str, Tensor]:
    """Return the parameters that a member starts from, and its settings, by name.

    Of a model that had to be ``met``, because it names its sites only when it runs, they are draws from the prior.
    """
    if start == "anchor":
        return at_anchors(template, seed)
    seed_generators(seed, next(site.start.device for site in template._sites.values()))
    if met:
        return tensors_of(template) | ({} if start == "module" else _drawn(template))
    fresh = model
    if start == "fresh":
        if isinstance(template.init, dict):
            raise PyroDropoutError(
                "the guide of the members has init=, one start for all of them, and start='fresh' a new one for each:"
                " leave out init, or write Ensemble(..., start='module')."
            )
        fresh = copy.deepcopy(model)
        for module in modules_of(fresh):
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
    made = make(fresh)
    check_alike(template, made)
    here, again = tensors_of(template), tensors_of(made)
    if start == "fresh" and all(torch.equal(here[name], again[name]) for name in _means(template)):
        again |= _drawn(template)  # no layer was initialised anew
    return again


def _means(template: SiteGuide) -> dict[str, GuideSite]:
    """Return the sites that have a mean of their own shape, by the name of that parameter."""
    here = tensors_of(template)
    named = {f"states.{site.key}.loc": site for site in template._sites.values()}
    return {name: site for name, site in named.items() if name in here and here[name].shape == site.start.shape}


def _drawn(template: SiteGuide) -> dict[str, Tensor]:
    """Return the means of all sites at draws from the prior, in unconstrained space, plates at full size.

    They are near the guide's own start: from the ends of a wide prior no training would arrive.
    """
    found = {}
    for name, site in _means(template).items():
        value = whole_prior(template, site.name).sample()
        free: Tensor = value if site.transform is None else site.transform.inv(value)
        found[name] = near(site.start, free.detach().reshape(site.start.shape).to(site.start))
    return found


def check_alike(template: SiteGuide, made: SiteGuide, settings: bool = False) -> None:
    """Raise an error unless two members differ in numbers only; with ``settings``, in parameters only.

    One member's loss is traced for all of them, so that a layer must not be dropped in one and a point in another.
    """
    if made is template:
        raise PyroDropoutError("guide must make a new guide whenever it is called; it gave the same one twice.")
    mine, theirs = tensors_of(template), tensors_of(made)
    wrong = [name for name in {**mine, **theirs} if name not in mine or name not in theirs]
    wrong += [name for name in mine if name in theirs and mine[name].shape != theirs[name].shape]
    if type(template) is not type(made) or list(template._sites) != list(made._sites):
        wrong.append(f"{type(template).__name__} and {type(made).__name__}")
    elif not wrong:
        with torch.no_grad():
            for ours, site in zip(template._sites.values(), made._sites.values(), strict=True):
                if type(template._marginal(ours)) is not type(made._marginal(site)):
                    wrong.append(site.name)
    if wrong:
        raise PyroDropoutError(
            f"guide must make guides that differ in numbers only, because all members are one computation; they differ"
            f" in {', '.join(wrong[:4])}. Does it draw its settings at random, and is a keep of 1 among them?"
        )
    different = [name for name, _ in template.named_buffers() if not torch.equal(mine[name], theirs[name])]
    if settings and different:
        raise PyroDropoutError(
            f"guide makes guides with different settings ({', '.join(different[:4])}). The members of a model that is"
            " not a network must have the same; make them outside of the function."
        )


_BAR = "|"  # stands for the dot in the name of a member's parameter: torch allows none


class StackedMembers(Summarised):
    """Members of one kind, a row of every tensor for each; ``template`` is a guide that ``make`` has made."""

    seeds: Tensor
    lost: Tensor
    learned_buffers = ("seeds", "lost")  # a file brings its own

    def __init__(
        self,
        model: PyroModel,
        make: Make,
        template: SiteGuide,
        start: Start,
        anchored: bool,
        members: int,
        seed: int | None,
    ) -> None:
        super().__init__()
        self._model, self._make, self._template = (model,), (make,), (template,)
        self.start, self.anchored = start, anchored
        template.is_member = True
        first = int(torch.randint(2**62, (), device="cpu")) if seed is None else seed % 2**63
        source = torch.Generator().manual_seed(first)
        self.register_buffer("seeds", torch.randint(2**62, (members,), generator=source, device="cpu"))
        self.register_buffer("lost", torch.zeros(members, dtype=torch.bool))
        if self.known:
            self._make_members()

    # --- what there is ------------------------------------------------------------------------------------------------

    @property
    def template(self) -> SiteGuide:
        """The guide of one member; which one, changes."""
        return self._template[0]

    @property
    def rows(self) -> int:
        """How many members there are, with those that have diverged."""
        return len(self.seeds)

    @property
    def members(self) -> int:
        """How many members there are; those that have diverged do not count."""
        return self.rows - int(self.lost.sum())

    @property
    def known(self) -> bool:
        """Whether the sites of the model are known."""
        return self.template.prototype_trace is not None

    @property
    def points(self) -> bool:
        """Whether the members are points."""
        return isinstance(self.template, Points)

    def stacked(self) -> dict[str, Tensor]:
        """Return the parameters of all rows, (rows, ...), by their names in a member's guide."""
        self.check_known()
        return {_name(key): value for key, value in self.named_parameters()}

    def settings(self) -> dict[str, Tensor]:
        """Return the settings of all rows, such as keep, (rows, ...), by their names in a member's guide."""
        return {_name(key): value for key, value in self.named_buffers() if key not in self.learned_buffers}

    def finite(self) -> Tensor:
        """Return for each row whether all its parameters are finite."""
        each = [value.detach().reshape(self.rows, -1).isfinite().all(1) for value in self.stacked().values()]
        return torch.stack(each).all(0)

    def numbered(self, numbers: Tensor) -> Tensor:
        """Return the rows of the members with these numbers."""
        self.check_usable()
        return (~self.lost).nonzero().flatten().cpu()[numbers.cpu()]

    def check_known(self) -> None:
        """Raise an error unless the sites of the model are known."""
        if not self.known:
            raise PyroDropoutError(
                "the ensemble has not seen its model's sites yet: fit it, or call it once with the model's arguments."
            )

    def check_usable(self) -> None:
        """Raise an error unless the sites of the model are known, and there is a member that has not diverged."""
        self.check_known()
        if not self.members:
            raise PyroDropoutError(
                f"all {self.rows} members have diverged: their parameters are not finite. Make the ensemble anew, and"
                " lower the learning rate or clip gradients (clip_norm=...)."
            )

    # --- making the members -------------------------------------------------------------------------------------------

    def meet(self, call: ModelCall) -> None:
        """Read a model that names its sites only when it runs, and make the members."""
        if self.known:
            return
        with forked(), poutine.block():
            call.of(self.template)
            if not self.template._sites:
                raise EmptyModelError("the model has no latent site, so the members of an ensemble would all be equal.")
            other = self._make[0](self._model[0])
            other.is_member = True
            call.of(other)
            check_alike(self.template, other, settings=True)
        self._make_members(met=True)

    def _make_members(self, met: bool = False) -> None:
        """Make the tensors of members that start from the seeds."""
        template, seeds, make = self.template, self.seeds.tolist(), self._make[0]
        with forked():
            rows = [started(self._model[0], make, template, self.start, seed, met) for seed in seeds]
        first, *others = rows
        equal = all(torch.equal(row[name], value) for row in others for name, value in first.items())
        if not self.anchored and self.points and others and equal:
            raise PyroDropoutError(
                "all members start at the same point and nothing else tells them apart, so they would stay equal. Let"
                " them be anchored, or give layers with reset_parameters and start='fresh'."
            )
        whole = {name: torch.stack([row[name] for row in rows]) for name in first}
        for name, like in template.named_parameters():
            self.register_parameter(name.replace(".", _BAR), nn.Parameter(whole[name].to(like)))
        for name, value in template.named_buffers():
            self.register_buffer(name.replace(".", _BAR), whole[name].to(value))

    # --- one of them --------------------------------------------------------------------------------------------------

    @contextmanager
    def as_member(self, member: int, detached: bool = True) -> Iterator[SiteGuide]:
        """Within this context, ``template`` is the guide of one member."""
        own, template = {**self.stacked(), **self.settings()}, self.template
        row = int(self.numbered(torch.tensor(member)))
        places: list[tuple[dict[str, Any], str, Tensor, Tensor]] = [
            (holder, key, own[".".join(filter(None, (path, key)))], value)
            for path, module in template.named_modules()
            for holder in (module._parameters, module._buffers)
            for key, value in holder.items()
            if value is not None
        ]
        with RUNNING:
            try:
                for holder, key, value, _ in places:
                    holder[key] = value.detach()[row] if detached else value[row]
                yield template
            finally:
                for holder, key, _, before in places:
                    holder[key] = before

    def tell(self) -> None:
        """Register the parameters of all rows with Pyro."""
        named = {name.replace("/", "."): value for name, value in self.stacked().items()}
        tell_pyro(self, named, type(self).__name__)

    # --- as a module --------------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.template._apply(fn, recurse)  # type: ignore[no-untyped-call]
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, object]:
        # Members are made from the model when its sites are known.
        return super().__getstate__() | ({} if self.known else {"_model": self._model})


def _name(key: str) -> str:
    return key.replace(_BAR, ".")
