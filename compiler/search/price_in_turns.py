"""Which name is priced next, and by which core.

this one      tensor=2  (waits for none: the next but one)  spatial=2
a second one  workers=6 ────────────────── pipeline=2
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from partc.compiler.planning.ahead import Ahead
from partc.compiler.search.rank_names import Promise, family_of
from partc.compiler.search.whole_steps import Priced, WholeSteps


@dataclass
class NameChoice:
    """Chooses which name is priced next. `further`: how many are priced when each family's best has been."""

    promises: Sequence[Promise]
    further: int
    place: int = 0
    tried: int = 0

    def following(self, least_s: float) -> str | None:
        """Return the next name where the quickest step so far takes so long; None: none is worth its plan."""
        for place in range(self.place, len(self.promises)):
            promise = self.promises[place]
            passed = {family_of(each.name) for each in self.promises[:place]}
            is_further = family_of(promise.name) in passed
            if promise.least_s > least_s or (is_further and self.tried >= self.further):
                continue
            self.place, self.tried = place + 1, self.tried + 1
            return promise.name
        return None

    def expected(self, least_s: float) -> Iterator[str]:
        """Yield the names that follow if none of them turns out to be quicker."""
        ahead = copy(self)
        while (name := ahead.following(least_s)) is not None:
            yield name


@dataclass(frozen=True)
class _Found:
    priced: Priced | None


class PriceInTurns:
    """Prices names by turns with a second core: what is expected next is priced before it is asked for.

    What is not asked for after all is dropped, even where it would be quicker: on one core it is not priced.
    """

    def __init__(self, price: WholeSteps, is_forked: bool) -> None:
        self._price, self._is_forked, self._processes = price, is_forked, ExitStack()
        self._here: dict[str, Priced | None] = {}
        self._ahead: dict[str, Ahead[_Found]] = {}

    def end(self) -> None:
        """End what the second core does."""
        self._processes.close()

    def __call__(self, name: str, expected: Sequence[str], best: Priced | None) -> Priced | None:
        """Return a name's price. `expected`: those that follow if it changes nothing; `best`: what would be
        taken now, which is made ready to be compiled while nothing else is to be done.
        """
        if not self._is_forked:
            return self._price(name, name)
        expected = [each for each in expected if each not in self._here]
        if name in self._ahead:
            if expected and not self._ahead[name].is_done:
                self.price_here(expected[0])
            known = [each for each in (best, *self._here.values()) if each is not None]
            if known and not self._ahead[name].is_done:
                self._price.compilation_of(min(known, key=attrgetter("step_s")))
            return self._ahead.pop(name).result().priced
        if name not in self._here:
            self._begin_next(expected)
            self.price_here(name)
        return self._here.pop(name)

    def price_here(self, name: str) -> Priced | None:
        """Return a name's price, which counts once it is asked for."""
        self._here[name] = self._price(name, name)
        return self._here[name]

    def _begin_next(self, expected: Iterable[str]) -> None:
        """Let the second core begin with the next name; what it was to find before is not asked for."""
        name = next(iter(expected), None)
        if name is None or name not in self._ahead:
            self._processes.close()
            self._ahead = {} if name is None else {name: self._begun(name)}

    def _begun(self, name: str) -> Ahead[_Found]:
        return self._processes.enter_context(Ahead(partial(_found, self._price, name), _Found))


def _found(price: WholeSteps, name: str) -> _Found:
    return _Found(price(name, name))
