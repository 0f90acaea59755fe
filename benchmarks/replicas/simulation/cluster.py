"""Replicas behind proxies as discrete events: arrivals, steps, replicas that die or start, autoscaling."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.replicas.simulation.replica import Replica, Slowdown
from benchmarks.replicas.simulation.routing import Policy, Proxy
from benchmarks.replicas.simulation.times import ServiceTimes
from benchmarks.replicas.simulation.workload import Request, Workload
from service.scale.proxy.ring import Ring

CONTROL_S = 1.0
"""Seconds between two decisions of the autoscaler."""


@dataclass(frozen=True)
class Autoscaling:
    """Ray Serve's rule: enough replicas for ``target`` ongoing requests each, by the mean over ``window_s``, once the
    demand has lasted ``delay_s``."""

    most: int
    target: float = 32.0
    window_s: float = 30.0
    delay_s: float = 30.0


@dataclass(frozen=True)
class Cluster:
    """Replicas and the proxies before them.

    ``forget_s`` is the time after which a proxy forgets a load: Ray Serve's default is 10 s. ``lost`` is a time, the
    number of replicas that die then, and the seconds until others take their place, start included. Clients repeat a
    request of a lost replica ``retries`` times.
    """

    times: ServiceTimes
    replicas: int
    policy: Policy = "affinity"
    slack: float = 1.25
    proxies: int = 1
    forget_s: float = 10.0
    retries: int = 1
    slowdowns: Sequence[Slowdown] = ()
    lost: tuple[float, int, float] | None = None
    autoscaling: Autoscaling | None = None
    seed: int = 0


@dataclass
class Outcome:
    """Every request with its end, and facts of the run: seconds, replicas over time, loads that proxies knew."""

    requests: list[Request]
    replicas: list[tuple[float, int]] = field(default_factory=list)
    retried: int = 0
    ages: list[float] = field(default_factory=list)
    """Age of the load of each chosen replica."""
    forgotten: int = 0
    busy_s: float = 0.0


class Simulation:
    """One run. Deterministic: the same cluster and requests give the same outcome."""

    def __init__(self, cluster: Cluster, requests: Sequence[Request]) -> None:
        self._cluster = cluster
        self._noise = random.Random(cluster.seed)
        self._proxies = [
            Proxy(cluster.policy, cluster.slack, cluster.forget_s, self._noise) for _ in range(cluster.proxies)
        ]
        self._replicas: dict[str, Replica] = {}
        self._outcome = Outcome(list(requests))
        self._numbers, self._order = itertools.count(), itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._ongoing: deque[tuple[float, int]] = deque()
        self._wanted_since: float | None = None
        self._starting = self._left = 0

    def run(self) -> Outcome:
        """Every request with its end."""
        cluster = self._cluster
        self._left = len(self._outcome.requests)
        self._start(0.0, cluster.replicas)
        for request in self._outcome.requests:
            self._at(request.arrival, lambda now, request=request: self._route(now, request))
        if cluster.lost is not None:
            self._at(cluster.lost[0], self._lose)
        if cluster.autoscaling is not None:
            self._at(CONTROL_S, self._control)
        while self._left:
            now, _, event = heapq.heappop(self._events)
            event(now)
        self._outcome.busy_s += sum(replica.busy_s for replica in self._replicas.values())
        return self._outcome

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _start(self, now: float, count: int) -> None:
        slow = self._cluster.slowdowns
        for number in itertools.islice(self._numbers, count):
            name = f"replica {number}"
            self._replicas[name] = Replica(name, self._cluster.times, slow[number % len(slow)] if slow else Slowdown())
        self._changed(now)

    def _changed(self, now: float) -> None:
        names = list(self._replicas)
        ring = Ring(names)
        for proxy in self._proxies:
            proxy.update(ring, names)
        self._outcome.replicas.append((now, len(names)))

    def _route(self, now: float, request: Request) -> None:
        if not self._replicas:
            self._ends(now, request, "lost")
            return
        request.proxy = self._noise.randrange(len(self._proxies))
        proxy = self._proxies[request.proxy]
        replica = self._replicas[proxy.choose(now, request.prefix, lambda name: self._replicas[name].load)]
        age = proxy.age(now, replica.name)
        if age is None:
            self._outcome.forgotten += 1
        else:
            self._outcome.ages.append(age)
        request.attempts += 1
        before = replica.ends
        if not replica.accept(now, request):
            self._ends(now, request, "refused")
        elif replica.ends != before:
            self._wake_at(replica)
        proxy.hear(now, replica.name, replica.load)

    def _wake_at(self, replica: Replica) -> None:
        ends = replica.ends
        if ends is not None:
            self._at(ends, lambda now: self._wake(now, replica))

    def _wake(self, now: float, replica: Replica) -> None:
        if replica.ends != now or replica.name not in self._replicas:
            return  # an arrival has cut these steps, or the replica has died
        for request in replica.wake():
            self._proxies[request.proxy].ended(now, replica.name)
            self._left -= 1
        self._wake_at(replica)

    def _ends(self, now: float, request: Request, outcome: str) -> None:
        request.end, request.outcome = now, outcome
        self._left -= 1

    def _lose(self, now: float) -> None:
        """Replicas die with their requests and caches."""
        assert self._cluster.lost is not None
        _, count, until = self._cluster.lost
        names = self._noise.sample(list(self._replicas), min(count, len(self._replicas)))
        dead = [self._replicas.pop(name) for name in names]
        self._changed(now)
        self._outcome.busy_s += sum(replica.busy_s for replica in dead)
        self._starting += len(dead)
        self._at(now + until, lambda then: self._started(then, len(dead)))
        for request in (request for replica in dead for request in replica.requests.values()):
            request.left, request.cached_tokens, request.first = 0, 0, math.nan
            if request.attempts > self._cluster.retries:
                self._ends(now, request, "lost")
            else:
                self._outcome.retried += 1
                self._route(now, request)

    def _control(self, now: float) -> None:
        """Start replicas if the mean load of the window has asked for them long enough."""
        rule = self._cluster.autoscaling
        assert rule is not None
        self._at(now + CONTROL_S, self._control)
        self._ongoing.append((now, sum(replica.load for replica in self._replicas.values())))
        while self._ongoing[0][0] < now - rule.window_s:
            self._ongoing.popleft()
        mean = sum(load for _, load in self._ongoing) / len(self._ongoing)
        missing = min(rule.most, math.ceil(mean / rule.target)) - len(self._replicas) - self._starting
        if missing <= 0:
            self._wanted_since = None
            return
        self._wanted_since = now if self._wanted_since is None else self._wanted_since
        if now - self._wanted_since >= rule.delay_s:
            self._starting += missing
            self._wanted_since = None
            self._at(now + self._cluster.times.start_s, lambda then: self._started(then, missing))

    def _started(self, now: float, count: int) -> None:
        self._starting -= count
        self._start(now, count)


def simulate(cluster: Cluster, requests: Iterable[Request]) -> Outcome:
    """One run of ``cluster`` with ``requests``, in the order of their arrivals."""
    return Simulation(cluster, list(requests)).run()


def capacity(times: ServiceTimes, workload: Workload) -> float:
    """Requests per second that one replica answers when many wait."""
    requests = simulate(Cluster(times, 1), workload.requests(1e6, 200, seed=1)).requests
    return len(requests) / max(request.end for request in requests)
