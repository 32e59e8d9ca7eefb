"""``mmog``: a game in five cities on the emulated WAN; the owners of avatars' topics follow their audience (ePulsar, §5.8.2).

Each city has a broker and a game server, which is a gateway 5 ms away with the avatars of its players. An avatar publishes on
a topic of its own and follows those of its group; after 30 to 60 s it joins another group, and from then on others follow it.
The bound is 100 ms. Two things are not the paper's, because with 35 ms between the farthest cities no placement could ever
miss that bound: links are ``stretch`` times as long, and topics begin at a broker chosen by their name's hash, as Pulsar's do.
What becomes of it is in :mod:`.owned_results`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, ClassVar, NamedTuple

import msgspec

from nearcast.experiments.experiment import Bar, Experiment, Parameters, at_least, at_most
from nearcast.experiments.owned_runs import check_machine, run_owned
from nearcast.experiments.run import Run
from nearcast.scenario.files import load_topology, resolve
from nearcast.scenario.scenario import Broker, Controller, Gateway, Scenario
from nearcast.scenario.topology import LatencyModel, Topology
from nearcast.scenario.workload import Change, Clients, Publishing, Subscribing

CITIES = ("new-york", "chicago", "dallas", "los-angeles", "seattle")
RATE_HZ = 300.0
PAYLOAD_BYTES = 998
GROUP = 8
"""Avatars in a group, on average: 64 of them are eight groups."""

STAY_S = (30.0, 60.0)
SETTLE_S = 3.0
PREFIX = "mmog"

SEEDED_S = 3.0
"""Topics get their first owners in this time, before avatars come."""

MARGIN_S = 1.0
"""Messages so shortly after a subscription and before its end are not missed: they may have been on their way."""


class Membership(NamedTuple):
    """An avatar is in a group from a moment on."""

    at_s: float
    avatar: int
    group: int


class MmogParameters(Parameters, frozen=True, kw_only=True):
    """``scale`` multiplies the 300 messages a second of each avatar; ``duration_s`` is how long they play and are judged."""

    duration_s: float = 600.0
    avatars: int = 64
    bound_ms: float = 100.0
    telemetry_s: float = 5.0
    """Between the reports of brokers, and between the controller's plans."""

    warm_s: float = 40.0
    """Before they are judged: coordinates settle, and topics leave the brokers that the hash chose."""

    stay_s: tuple[float, float] = STAY_S
    """How long an avatar stays in a group: at least, at most."""

    stretch: float = 2.0
    """How many times as long as the paper's links are."""

    qos: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(2 <= self.avatars <= 10_000, "avatars", "must be between 2 and 10,000")
        self.require(0.1 <= self.telemetry_s <= 600, "telemetry_s", "must be between 0.1 and 600")
        self.require(1 <= self.bound_ms <= 60_000, "bound_ms", "must be between 1 and 60,000")
        self.require(SEEDED_S < self.warm_s <= 3_600, "warm_s", f"must be above {SEEDED_S:g}, and at most 3,600")
        self.require(0 < self.stay_s[0] <= self.stay_s[1], "stay_s", "must be two times, the shorter one first")
        self.require(0.1 <= self.stretch <= 100, "stretch", "must be between 0.1 and 100")
        self.require(self.qos in (0, 1, 2), "qos", "must be 0, 1 or 2")

    @property
    def groups(self) -> int:
        return max(2, round(self.avatars / GROUP))


class Mmog(Experiment[MmogParameters]):
    name = "mmog"
    summary = "A game in five cities: owners of avatars' topics follow who watches them, and 100 ms hold (ePulsar, figure 9)."
    parameters = MmogParameters
    quick: ClassVar[Mapping[str, Any]] = {
        "scale": 0.007,
        "duration_s": 20.0,
        "avatars": 24,
        "telemetry_s": 1.0,
        "warm_s": 15.0,
        "stay_s": (6.0, 12.0),
    }

    def bars(self, parameters: MmogParameters) -> Sequence[Bar]:
        return [
            at_least(
                "within_bound_percent",
                99.0,
                f"of the time, each topic kept {parameters.bound_ms:g} ms, outside the 2 s after somebody began to follow it",
            ),
            at_most(
                "longest_violation_s",
                2 * parameters.telemetry_s,
                "from such a change to the end of the violation it caused; the longest: two telemetry periods",
            ),
            at_least("regroupings", 1, "of avatars, while they are judged"),
            at_least("migrations", 1, "of owners, by the controller's plan"),
            *([at_most("lost", 0, "deliveries that should have been and were not")] if parameters.qos else []),
        ]

    def check(self, parameters: MmogParameters) -> None:
        check_machine()
        scenario_of(parameters)

    def run(self, run: Run[MmogParameters]) -> None:
        # NumPy and pyarrow are loaded where they are needed: `list` imports this module.
        from nearcast.experiments import mmog_results

        parameters = run.parameters
        scenario = scenario_of(parameters)
        run.keep("scenario.json", scenario)
        run.keep("groups.json", [each._asdict() for each in memberships(parameters)])
        mmog_results.evaluate(run, scenario, run_owned(run, scenario, PREFIX))


def avatar_topic(avatar: int) -> str:
    """On which an avatar's actions are published."""
    return f"{PREFIX}/avatar/{avatar}"


def avatar_name(avatar: int) -> str:
    """Its client."""
    return f"avatar-{avatar}"


def city_of(avatar: int) -> str:
    """Where its player is: evenly over the cities."""
    return CITIES[avatar % len(CITIES)]


def hashed_city(topic: str) -> str:
    """Where a topic begins: as if nobody knew where its clients are."""
    return CITIES[int.from_bytes(hashlib.sha256(topic.encode()).digest()[:8], "big") % len(CITIES)]


def memberships(parameters: MmogParameters) -> list[Membership]:
    """Who is in which group from when on, in the order of time; all follows from the seed."""
    end_s = parameters.warm_s + parameters.duration_s
    found: list[Membership] = []
    for avatar in range(parameters.avatars):
        rng = Random(f"{parameters.seed}/avatar/{avatar}")
        group = rng.randrange(parameters.groups)
        found.append(Membership(0.0, avatar, group))
        at_s = SEEDED_S + rng.uniform(*parameters.stay_s)
        while at_s < end_s:
            group = (group + rng.randrange(1, parameters.groups)) % parameters.groups
            found.append(Membership(round(at_s, 3), avatar, group))
            at_s += rng.uniform(*parameters.stay_s)
    return sorted(found)


class Following(NamedTuple):
    """An avatar follows another for a time."""

    follower: int
    followed: int
    from_s: float
    until_s: float


def followings(parameters: MmogParameters) -> list[Following]:
    """Who follows whom when: those of the same group each other."""
    end_s = parameters.warm_s + parameters.duration_s + SETTLE_S
    groups: dict[int, set[int]] = {}
    where: dict[int, int] = {}
    since: dict[tuple[int, int], float] = {}
    found: list[Following] = []
    for change in memberships(parameters):
        old = where.get(change.avatar)
        if old is not None:
            groups[old].discard(change.avatar)
            for other in groups[old]:
                for pair in ((change.avatar, other), (other, change.avatar)):
                    found.append(Following(*pair, since.pop(pair), change.at_s))
        where[change.avatar] = change.group
        members = groups.setdefault(change.group, set())
        for other in members:
            since[change.avatar, other] = since[other, change.avatar] = change.at_s
        members.add(change.avatar)
    found += [Following(*pair, from_s, end_s) for pair, from_s in since.items()]
    return sorted(found, key=lambda each: (each.from_s, each.follower, each.followed))


def changes_of(parameters: MmogParameters) -> dict[int, tuple[Change, ...]]:
    """What each avatar subscribes to, and gives up, and when; the first ones when avatars come."""
    end_s = parameters.warm_s + parameters.duration_s
    begins: dict[int, dict[float, list[int]]] = {}
    ends: dict[int, dict[float, list[int]]] = {}
    for each in followings(parameters):
        begins.setdefault(each.follower, {}).setdefault(max(each.from_s, SEEDED_S), []).append(each.followed)
        if each.until_s < end_s:
            ends.setdefault(each.follower, {}).setdefault(each.until_s, []).append(each.followed)
    found: dict[int, tuple[Change, ...]] = {}
    for avatar in range(parameters.avatars):
        starting, ending = begins.get(avatar, {}), ends.get(avatar, {})
        found[avatar] = tuple(
            Change(
                at_s=at_s,
                subscribe=tuple(
                    Subscribing(filter=avatar_topic(other), qos=parameters.qos) for other in sorted(starting.get(at_s, ()))
                ),
                unsubscribe=tuple(avatar_topic(other) for other in sorted(ending.get(at_s, ()))),
            )
            for at_s in sorted({*starting, *ending})
        )
    return found


def scenario_of(parameters: MmogParameters) -> Scenario:
    """The scenario, as data; who follows whom when is spelt out in it."""
    changes = changes_of(parameters)
    stream = Publishing(
        topic=PREFIX,
        rate_hz=RATE_HZ * parameters.scale,
        payload_bytes=PAYLOAD_BYTES,
        qos=parameters.qos,
        bound_ms=parameters.bound_ms,
    )
    avatars = [
        Clients(
            name=avatar_name(avatar),
            host=f"server-{city_of(avatar)}",
            broker=f"server-{city_of(avatar)}",
            start_s=SEEDED_S,
            clean_start=False,
            publish=(msgspec.structs.replace(stream, topic=avatar_topic(avatar)),),
            changes=changes[avatar],
        )
        for avatar in range(parameters.avatars)
    ]
    topics = [avatar_topic(avatar) for avatar in range(parameters.avatars)]
    return resolve(
        Scenario(
            name=PREFIX,
            description="ePulsar's game (section 5.8.2): the owners of avatars' topics follow who watches them.",
            topology=topology_of(parameters),
            protocol="fabric",
            duration_s=parameters.warm_s + parameters.duration_s,
            settle_s=SETTLE_S,
            settings={
                "fabric": {
                    "classes": [{"topic": f"{PREFIX}/#", "topic_class": "owned", "max_latency_ms": parameters.bound_ms}],
                    "telemetry": {"interval_seconds": parameters.telemetry_s},
                },
            },
            controller=Controller(host="manager"),
            brokers=tuple(Broker(host=f"broker-{city}", fabric=True) for city in CITIES),
            gateways=tuple(Gateway(host=f"server-{city}") for city in CITIES),
            clients=(*_first_owners(topics, parameters), *avatars),
        )
    )


def _first_owners(topics: Sequence[str], parameters: MmogParameters) -> list[Clients]:
    """A client at each broker that says a word on the topics that begin there: whoever asks first for a topic owns it."""
    found = []
    for city in CITIES:
        own = [topic for topic in topics if hashed_city(topic) == city]
        if own:
            word = Publishing(topic=PREFIX, rate_hz=1.0, payload_bytes=PAYLOAD_BYTES, qos=parameters.qos)
            found.append(
                Clients(
                    name=f"first-{city}",
                    host=f"server-{city}",
                    broker=f"broker-{city}",
                    stop_s=SEEDED_S - 1.5,
                    leave=True,
                    publish=tuple(msgspec.structs.replace(word, topic=topic) for topic in own),
                )
            )
    return found


def topology_of(parameters: MmogParameters) -> Topology:
    """The ready-made one with longer links; players are at their game server."""
    topology = load_topology("mmog")
    model = topology.model or LatencyModel()
    return msgspec.structs.replace(
        topology,
        model=msgspec.structs.replace(model, inflation=model.inflation * parameters.stretch),
        hosts=tuple(host for host in topology.hosts if not host.name.startswith("players-")),
    )
