"""Who of a job lives, who does not, and who is to blame: decisions alone, no sockets and no clocks.

    dead    its keeper says how it ended
    hung    its keeper says for how long there has been no sign of life
    lost    its keeper died without a word, or is out of reach
    stuck   nobody's position has changed for long: who waits for nobody is to blame

A member that is slow is none of these. Time that the supervisor did not watch, because it was stopped itself,
counts for nobody.
"""

import signal
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from partc.runtime.errors import Cause
from partc.runtime.supervision.messages import Beat, Ended, Position

_LONGEST_LOOK_S = 1.0
_CRASHES = (-signal.SIGSEGV, -signal.SIGBUS)
_TOGETHER_S = 1.0  # between the last words of keepers that fell silent together


@dataclass(frozen=True, slots=True)
class Limits:
    """How long something may be so until a member is taken for it, in seconds."""

    hung_s: float
    quiet_s: float  # the same, until it is said that it is silent
    silent_s: float  # a keeper that is connected, but not heard
    deaf_s: float  # the same, while its host's system acknowledges what is sent to it
    gone_s: float  # a keeper that is not connected
    stuck_s: float | None  # None: no limit


@dataclass(frozen=True, slots=True)
class Trouble:
    """A member that ended a job, or would. `is_echo`: others' end explains it.

    `time_s`: when the supervisor learned of it; `told_s`: when it happened, by the clock of its host.
    """

    cause: Cause
    is_echo: bool
    time_s: float
    told_s: float = 0.0
    ended: Ended | None = None


@dataclass(slots=True)
class _Member:
    name: str
    host: str
    beat: Beat | None = None
    ended: Ended | None = None
    ended_s: float = 0.0
    heard_s: float = 0.0
    seen_s: float = 0.0  # to run, though it was not heard
    moved_s: float = 0.0
    gone_s: float | None = None
    is_dead: bool = False  # its keeper is, as somebody saw
    deaf_s: float | None = None  # since when its host acknowledges, and it is not heard
    stopped_s: float | None = None  # since when its keeper is stopped, which has not been heard yet

    @property
    def position(self) -> Position:
        if self.ended is not None:
            return self.ended.position
        return Position(at="before it started") if self.beat is None else self.beat.position


class Roster:
    """The members of a job. Times are seconds of a clock that stands still while nobody watches."""

    def __init__(self, hosts: Mapping[str, str], limits: Limits) -> None:
        self._members = {name: _Member(name, host) for name, host in hosts.items()}
        self._limits = limits
        self._now_s = 0.0
        self._looked_s: float | None = None
        self._forgotten: set[str] = set()
        self._silent: set[str] = set()  # and it has been said
        self._first = ""  # whom others' ends follow from, if that is known
        self._most = 2 * len(hosts)
        self.is_stopping = False  # then an end by SIGTERM is what was asked for

    def pass_time(self, now_s: float) -> None:
        """Let time pass; `now_s` is any monotonic clock's."""
        if self._looked_s is not None:
            self._now_s += min(now_s - self._looked_s, _LONGEST_LOOK_S)
        self._looked_s = now_s

    def expect(self, name: str, host: str) -> None:
        """Make somebody a member who was none from the beginning."""
        self._members.setdefault(name, _Member(name, host))

    def knows(self, name: str) -> bool:
        """Tell whether somebody is a member. Processes that MPI did not number may be, as many as ranks."""
        return name in self._members or (name.startswith("process ") and len(self._members) < self._most)

    def hear_beat(self, name: str, beat: Beat) -> None:
        """Take in that a member is there."""
        member = self._members.setdefault(name, _Member(name, beat.host))
        if member.beat is None or member.beat.position != beat.position:
            member.moved_s = self._now_s
        member.beat, member.heard_s, member.deaf_s = beat, self._now_s, None
        member.gone_s = member.gone_s if member.is_dead else None

    def hear_end(self, name: str, ended: Ended) -> None:
        """Take in that a member has ended."""
        member = self._members.setdefault(name, _Member(name, ""))
        if member.ended is None:
            member.ended, member.ended_s, member.moved_s = ended, self._now_s, self._now_s

    def miss(self, names: Iterable[str]) -> None:
        """Take in whose keepers cannot be reached; all others can."""
        unreachable = set(names)
        for member in self._members.values():
            if member.is_dead:
                continue
            if member.name not in unreachable:
                member.gone_s = None
            elif member.gone_s is None:
                member.gone_s = self._now_s

    def lose(self, names: Iterable[str]) -> None:
        """Take in whose keepers have died without a word, heard before or not."""
        for member in (self._members[name] for name in names):
            if not member.is_dead:
                member.is_dead, member.gone_s = True, self._now_s

    def lose_first(self, name: str) -> None:
        """Take in whose keeper died, or what started it, before all others that did."""
        self._first = name
        if self._members[name].ended is None:
            self.lose([name])

    def acknowledge(self, names: Collection[str]) -> None:
        """Take in whose hosts acknowledge what is sent, of those that are not heard; others' do not."""
        for name in self.quiet():
            member = self._members[name]
            if name not in names:
                member.deaf_s = None
            elif member.deaf_s is None:
                member.deaf_s = self._now_s

    def see(self, name: str) -> None:
        """Take in that a member's keeper runs, though it is not heard: it is slow."""
        self._members[name].seen_s = self._now_s

    def stop_unheard(self, names: Iterable[str]) -> None:
        """Take in whose keepers are stopped, of those that have not been heard; all others are not."""
        stopped = set(names)
        for member in self._members.values():
            if member.name not in stopped:
                member.stopped_s = None
            elif member.stopped_s is None:
                member.stopped_s = self._now_s

    def living(self) -> list[str]:
        """Return the members that have been heard, and have not ended."""
        return [m.name for m in self._members.values() if m.beat is not None and m.ended is None]

    def unheard(self) -> list[str]:
        """Return the members whose keepers have not been heard yet."""
        return [m.name for m in self._members.values() if m.beat is None and m.ended is None]

    def quiet(self) -> list[str]:
        """Return the members whose keepers have not been heard for long, and are not known to be dead."""
        limit_s = self._now_s - self._limits.quiet_s
        alive = (m for m in self._members.values() if m.beat is not None and m.ended is None)
        return [m.name for m in alive if not m.is_dead and m.heard_s < limit_s]

    def may_answer(self, name: str) -> bool:
        """Tell whether an answer of a member's keeper is to be expected."""
        return not self._members[name].is_dead and name not in self.quiet()

    def beat(self, name: str) -> Beat | None:
        """Return a member's last beat."""
        return self._members[name].beat if name in self._members else None

    def beats(self) -> list[Beat]:
        """Return the last beat of every member that was ever heard."""
        return [member.beat for member in self._members.values() if member.beat is not None]

    def ended(self) -> dict[str, Ended]:
        """Return how those members ended that have."""
        return {m.name: m.ended for m in self._members.values() if m.ended is not None}

    def has_ended_by(self, number: int) -> bool:
        """Tell whether a signal of this number has ended a member."""
        return any(ended.code == -number for ended in self.ended().values())

    @property
    def still_s(self) -> float:
        """For how long nobody's position has changed."""
        return self._now_s - max((member.moved_s for member in self._members.values()), default=0.0)

    def position(self, name: str) -> Position:
        """Return where a member was last."""
        return self._members[name].position if name in self._members else Position()

    def forget(self, name: str) -> None:
        """Ask no more about a member."""
        self._forgotten.add(name)

    def silences(self) -> list[str]:
        """Say what is new of keepers that are not heard, though connected: nobody is given up for it yet.

        Each silence is told once, and once that it is over.
        """
        heard = [m for m in self._members.values() if m.beat is not None and m.ended is None]
        alive = [m for m in heard if not m.is_dead]
        quiet_s = {m.name: self._now_s - m.heard_s for m in alive if m.name not in self._forgotten}
        longest_s = max(quiet_s.values(), default=0.0)
        since_s = self._limits.quiet_s - (_TOGETHER_S if longest_s > self._limits.quiet_s else 0.0)
        silent = {name for name, passed_s in quiet_s.items() if passed_s > since_s}
        new, over = silent - self._silent, (self._silent & quiet_s.keys()) - silent
        self._silent = silent
        limits = f"for {longest_s:.0f} s; given up after {self._limits.silent_s:.0f} s"
        if (sooner_s := self._limits.quiet_s + self._limits.deaf_s) < self._limits.silent_s:
            limits += f", {sooner_s:.0f} s while its host answers"
        lines = [f"{who}: not heard {limits}" for who in self._by_host(new, quiet_s)]
        return lines + [f"{who}: heard again" for who in self._by_host(over, quiet_s)]

    def _by_host(self, names: set[str], members: Iterable[str]) -> Iterator[str]:
        """Yield hosts, all of whose `members` are among the names, and the other names with their hosts."""
        by_host: dict[str, list[str]] = {}
        for name in members:
            by_host.setdefault(self._members[name].host, []).append(name)
        for host, there in by_host.items():
            these = [name for name in there if name in names]
            if these:
                yield (
                    f"host {host} ({', '.join(these)})" if these == there else f"{', '.join(these)} on {host}"
                )

    def troubles(self) -> list[Trouble]:
        """Return who is in trouble, whom to blame first."""
        members = [member for name, member in self._members.items() if name not in self._forgotten]
        troubles = [trouble for member in members if (trouble := self._trouble(member)) is not None]
        if not troubles and self._limits.stuck_s is not None and self.still_s > self._limits.stuck_s:
            troubles = self._standstill(members, self._limits.stuck_s)
        return sorted(troubles, key=self._order)

    def _order(self, trouble: Trouble) -> tuple[bool, bool, float, float]:
        is_first = trouble.cause.member == self._first
        return not is_first, trouble.is_echo, trouble.time_s, trouble.told_s

    def _trouble(self, member: _Member) -> Trouble | None:
        limits, now_s = self._limits, self._now_s
        if member.ended is not None:
            return self._end(member, member.ended)
        if member.is_dead:
            return Trouble(_cause("lost", member, "was lost: its keeper died"), False, member.gone_s or 0.0)
        if member.beat is None:
            return self._unheard_trouble(member)
        if member.beat.still_s > limits.hung_s:
            reason = f"hangs: no sign of life for {member.beat.still_s:.0f} s"
            return Trouble(_cause("hung", member, reason), False, now_s - limits.hung_s)
        if member.gone_s is not None and now_s - member.gone_s > limits.gone_s:
            return Trouble(_cause("lost", member, "was lost: its keeper died"), False, member.gone_s)
        is_deaf = member.deaf_s is not None and now_s - member.deaf_s > limits.deaf_s
        if is_deaf or now_s - max(member.heard_s, member.seen_s) > limits.silent_s:
            reason = f"was lost: not heard for {now_s - member.heard_s:.0f} s"
            reason += ", though its host answers" if is_deaf else ""
            return Trouble(_cause("lost", member, reason), False, member.heard_s)
        return None

    def _unheard_trouble(self, member: _Member) -> Trouble | None:
        since_s = member.stopped_s
        if since_s is None or self._now_s - since_s <= self._limits.hung_s:
            return None
        reason = f"was lost: not heard for {self._now_s - since_s:.0f} s, its keeper is stopped"
        return Trouble(_cause("lost", member, reason), False, since_s)

    def _end(self, member: _Member, ended: Ended) -> Trouble | None:
        if ended.failure is not None:
            cause = _cause("failed", member, ended.failure.what)
            return Trouble(cause, ended.failure.is_echo, member.ended_s, ended.failure.time_s, ended)
        if ended.by_keeper:
            cause = _cause("lost", member, f"was ended: {ended.by_keeper}")
            return Trouble(cause, True, member.ended_s, ended.time_s, ended)
        if ended.is_well or (self.is_stopping and ended.code == -signal.SIGTERM):
            return None
        # An exit without a word, and abort(), are how MPI answers the end of another rank; or it crashes.
        is_crash = ended.code in _CRASHES and ended.position.awaits
        is_echo = ended.code > 0 or ended.code == -signal.SIGABRT or is_crash
        untold = "" if ended.code else ", without a report"
        cause = _cause("killed", member, f"died: {how(ended.code)}{untold}")
        return Trouble(cause, is_echo, member.ended_s, ended.time_s, ended)

    def _standstill(self, members: list[_Member], limit_s: float) -> list[Trouble]:
        """Blame whoever waits for nobody: of these, and where all wait, who is furthest behind."""
        alive = [member for member in members if member.ended is None]
        if not alive:
            return []
        busy = [member for member in alive if not member.position.awaits] or alive
        last = min(busy, key=lambda member: (member.beat is not None, member.position.step, member.moved_s))
        waiting = [member for member in alive if member.position.awaits and member is not last]
        reason = f"did not go on for {limit_s:.0f} s"
        if waiting:
            reason += f", and {waiting[0].name} waits in {waiting[0].position.at}"
        return [Trouble(_cause("stuck", last, reason), False, last.moved_s)]


def how(code: int) -> str:
    """Say how a process ended."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


def _cause(kind: Literal["killed", "failed", "hung", "stuck", "lost"], member: _Member, reason: str) -> Cause:
    position = member.position
    return Cause(kind, member.name, member.host, position.device, position.step, position.at, reason)
