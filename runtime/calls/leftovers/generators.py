"""Random number generators that an import or a build has made. Forks would draw the same numbers from them.

If the handler's author chose a generator's seed, a fork does not change the generator: it draws the same numbers in a worker
as in a fresh process. A generator without such a seed gets a new seed in each fork. If a seed may differ at each import,
because it came from the clock or from entropy, only a process that imports for itself draws the right numbers.
"""

from __future__ import annotations

import gc
import numbers
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

# The smallest seed that may be entropy. Seeds from the clock, in nanoseconds or in microseconds, are also larger.
ENTROPY = 1 << 32
# A seed that is this near to the clock, in seconds, was taken from the clock.
NEAR_S = 86400
# The seed of every new torch.Generator.
TORCH_SEED = 67280421310721
# Used in place of a seed that the author chose and that cannot be read.
CHOSEN = 0
_NUMPY_FUNCTIONS = ("seed", "get_state", "set_state")


def may_vary(seed: object) -> bool:
    """Return True if a seed may differ at each import."""
    if isinstance(seed, numbers.Integral):
        number = abs(int(seed))
        return number >= ENTROPY or abs(number - time.time()) < NEAR_S or number == os.getpid()
    if isinstance(seed, Iterable) and not isinstance(seed, (str, bytes, bytearray)):
        return any(map(may_vary, seed))
    return not isinstance(seed, (str, type(None)))


class _States:
    """The states that were read from generators, each with the seed that the generator had."""

    def __init__(self) -> None:
        self._seeds: dict[object, object] = {}

    def note(self, state: object, seed: object) -> None:
        self._seeds[_hashable(state)] = seed

    def seed_of(self, state: object) -> object:
        """Return the seed of the generator from which a state was read. Return CHOSEN if `note` does not know the state."""
        return self._seeds.get(_hashable(state), CHOSEN)


def _hashable(state: Any) -> object:
    """Return a generator's state in a form that can be a key."""
    if isinstance(state, dict):
        state = tuple(state.values())
    if isinstance(state, (tuple, list)):
        return tuple(map(_hashable, state))
    # An array of numpy.
    return state.tobytes() if hasattr(state, "tobytes") else state


class Generators:
    """The generators of this process, and which of them got a seed from the handler's author."""

    def __init__(self) -> None:
        self._seeds = WeakKeyDictionary[random.Random, object]()
        self._states = _States()
        # `_numpy` is the seed of numpy's global generator. `_drawn` has the entropy that numpy drew as seeds for other generators.
        self._numpy: object = None
        self._drawn = set[int]()
        # The seed that torch's global generator has after the import of torch. The author has not chosen it.
        self._torch: int | None = None
        self._known: list[Any] = []
        self._undo: list[tuple[Any, str, Any]] = []

    # -- watching seeds

    @contextmanager
    def watch(self) -> Iterator[None]:
        """In the block, note which generators get which seeds."""
        self._watch_random()
        for name in ("numpy.random.bit_generator", "numpy.random", "torch"):
            if name in sys.modules:
                self.on_import(name)
        try:
            yield
        finally:
            for owner, name, original in reversed(self._undo):
                setattr(owner, name, original)
            self._undo.clear()

    def on_import(self, name: str) -> None:
        """Watch the generators of a module that was imported."""
        module: Any = sys.modules.get(name)
        if name == "numpy.random.bit_generator" and hasattr(module, "randbits"):
            self._replace(module, "randbits", partial(self._draw, module.randbits))
        elif name == "numpy.random":
            for function in _NUMPY_FUNCTIONS:
                self._replace(
                    module, function, partial(getattr(self, f"_numpy_{function}"), getattr(module, function))
                )
        elif name == "torch":
            self._torch = module.initial_seed()

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, new)

    def _watch_random(self) -> None:
        seeds, states = self._seeds, self._states
        plain_seed, plain_get, plain_set = random.Random.seed, random.Random.getstate, random.Random.setstate

        def note(generator: random.Random, seed: object) -> None:
            # TypeError means that the generator's class has no hash. Its seeds are not noted.
            with suppress(TypeError):
                seeds[generator] = seed

        def seed(generator: random.Random, *arguments: Any, **named: Any) -> None:
            plain_seed(generator, *arguments, **named)
            note(generator, arguments[0] if arguments else named.get("a"))

        def getstate(generator: random.Random) -> Any:
            state = plain_get(generator)
            states.note(state, seeds.get(generator))
            return state

        def setstate(generator: random.Random, state: Any) -> None:
            plain_set(generator, state)
            note(generator, states.seed_of(state))

        methods: dict[str, Callable[..., Any]] = {"seed": seed, "getstate": getstate, "setstate": setstate}
        for name, new in methods.items():
            self._replace(random.Random, name, new)
            # Replace the functions of the module too: they are methods of one generator.
            self._replace(random, name, partial(new, _generator_of(getattr(random, name))))

    def _draw(self, plain: Callable[[int], int], bits: int) -> int:
        self._drawn.add(entropy := plain(bits))
        return entropy

    def _numpy_seed(self, plain: Callable[..., None], seed: Any = None) -> None:
        plain(seed)
        self._numpy = seed

    def _numpy_get_state(self, plain: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        state = plain(*arguments, **named)
        self._states.note(state, self._numpy)
        return state

    def _numpy_set_state(self, plain: Callable[..., None], state: Any) -> None:
        plain(state)
        self._numpy = self._states.seed_of(state)

    # -- finding generators

    def keep(self) -> None:
        """Remember the generators that exist now. Freezing objects hides them from later searches."""
        # Leave out SeedSequences: a renewed generator gets another one, and the old object is garbage.
        self._known = [one for one in self._search() if type(one).__name__ != "SeedSequence"]

    def find(self, held: Iterable[Any] = ()) -> tuple[list[Callable[[], object]], list[Any]]:
        """Return the functions that each fork must call, and the generators with a seed that may vary.

        The functions reseed the generators without a seed from the author. If the author has chosen the seed of the module
        random, one function undoes the reseeding by Python itself.
        `held` are the objects that the handler's variables refer to. Search them for torch's generators, which the garbage
        collector does not list.
        """
        renewals: list[Callable[[], object]] = []
        varying: list[Any] = []
        found = self._search()
        for one in found:
            if isinstance(one, random.Random):
                # Python itself reseeds the generator of the module random in each fork (`renewed`).
                seed, renewed = self._seeds.get(one), one is _generator_of(random.seed)
                if seed is None and not renewed:
                    renewals.append(partial(random.Random.seed, one))
                elif seed is not None and may_vary(seed):
                    varying.append(one)
                elif seed is not None and renewed:
                    renewals.append(partial(random.Random.setstate, one, one.getstate()))
        if (numpy := sys.modules.get("numpy.random")) is not None:
            self._find_numpy(numpy, found, renewals, varying)
        if (torch := sys.modules.get("torch")) is not None:
            if self._torch in (None, seed := torch.initial_seed()):
                renewals.append(torch.default_generator.seed)
            elif may_vary(seed):
                varying.append(torch.default_generator)
            kinds = (torch.Generator,)
            made = [one for one in held if type(one) in kinds and one is not torch.default_generator]
            varying += [one for one in made if (seed := one.initial_seed()) != TORCH_SEED and may_vary(seed)]
        return renewals, varying

    def _find_numpy(
        self, numpy: Any, found: list[Any], renewals: list[Callable[[], object]], varying: list[Any]
    ) -> None:
        own = numpy.mtrand._rand  # noqa: SLF001
        owned = [own._bit_generator, *(one for one in found if isinstance(one, numpy.BitGenerator))]  # noqa: SLF001
        for bits in {id(one): one for one in owned}.values():
            seed = self._numpy if bits is owned[0] else self._entropy(getattr(bits, "_seed_seq", None))
            if seed is None:
                renewals.append(partial(self._renew, bits))
            elif may_vary(seed):
                varying.append(bits)
        renewed = {id(renewal.args[0]) for renewal in renewals if isinstance(renewal, partial)}
        renewals += [
            partial(_forget_gauss, one) for one in {id(one): one for one in (own, *found)}.values()
            if isinstance(one, numpy.RandomState) and id(one._bit_generator) in renewed  # noqa: SLF001
        ]  # fmt: skip
        sequences = {id(getattr(bits, "_seed_seq", None)) for bits in owned}
        # Count a sequence that belongs to no generator as varying unless the author chose its seed: later generators get
        # seeds from the sequence, and it cannot be renewed.
        varying += [
            one for one in found
            if isinstance(one, numpy.SeedSequence) and id(one) not in sequences
            and ((seed := self._entropy(one)) is None or may_vary(seed))
        ]  # fmt: skip

    def _entropy(self, sequence: Any) -> object:
        """Return the seed of a generator with this SeedSequence. Return None if numpy drew the seed, CHOSEN if it is unknown."""
        seed = getattr(sequence, "entropy", None)
        if seed is None:
            return CHOSEN
        return None if isinstance(seed, int) and seed in self._drawn else seed

    def _renew(self, bits: Any) -> None:
        """Give a new seed to a generator of numpy. The object stays, because variables refer to it."""
        fresh = type(bits)()
        bits.__setstate__(fresh.__getstate__())
        # Record that the author has not chosen this seed, for a zygote that inherits the generator.
        self._drawn.add(getattr(getattr(fresh, "_seed_seq", None), "entropy", 0))

    def _search(self) -> list[Any]:
        kinds = set(_subclasses(random.Random)) - set(_subclasses(random.SystemRandom))
        if (numpy := sys.modules.get("numpy.random")) is not None:
            for kind in (numpy.BitGenerator, numpy.RandomState, numpy.SeedSequence):
                kinds |= set(_subclasses(kind))
        # Use `type`, because `isinstance` runs the code of proxy objects.
        found = [*self._known, *(one for one in gc.get_objects() if type(one) in kinds)]
        return list({id(one): one for one in found}.values())


def _generator_of(function: Any) -> object:
    """Return the generator behind a function of the module random."""
    return function.__self__


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for one in kind.__subclasses__():
        yield from _subclasses(one)


def _forget_gauss(legacy: Any) -> None:
    """Forget the second number of the last pair from a normal distribution. Else a renewed generator would return it first."""
    legacy.set_state({**legacy.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0})
