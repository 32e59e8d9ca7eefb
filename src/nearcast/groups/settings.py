"""How patient and how eager group formation is."""

from __future__ import annotations


class FormationSettings:
    """Seconds unless said otherwise. The first three are the paper's broker's (a main loop of 100 ms, transactions that
    expire after 1 s)."""

    def __init__(
        self,
        *,
        ask_interval_s: float = 0.1,
        answer_timeout_s: float = 1.0,
        join_timeout_s: float = 1.0,
        retry_s: float = 1.0,
        idle_interval_s: float = 1.0,
        check_interval_s: float = 1.0,
        measure_timeout_s: float = 5.0,
        renew_interval_s: float = 5.0,
        join_tries: int = 3,
        max_hops: int = 3,
        view_interval_s: float = 0.05,
        updates_per_s: float = 2_000.0,
    ) -> None:
        self.ask_interval_s = ask_interval_s
        """About how long a leader waits before it asks again. Each wait is drawn from half to one and a half of it: leaders
        that asked each other's neighbours at the same time do not do so again."""
        self.answer_timeout_s = answer_timeout_s
        """A leader that does not answer for so long will not. Too low gives up on far ones, too high waits for the dead."""
        self.join_timeout_s = join_timeout_s
        """The same for a Join, which is then said again."""
        self.retry_s = retry_s
        """How long a leader leaves one alone that did not answer, or would not merge."""
        self.idle_interval_s = idle_interval_s
        """A leader that has nobody to ask looks less and less often, down to this."""
        self.check_interval_s = check_interval_s
        """How often a member looks whether its leader is still near."""
        self.measure_timeout_s = measure_timeout_s
        """How long a leader that was never measured may stay so before it counts as unreachable."""
        self.renew_interval_s = renew_interval_s
        """How often a member tells its leader that it is one, and which view it has. After four of these without a word a
        leader takes a member off its view. Whatever a lost message left behind is put right within this time."""
        self.join_tries = join_tries
        """How often a Join is said before the broker gives up; an Ask is said again only when a link comes up."""
        self.max_hops = max_hops
        """How many brokers in a row may send a joining one on to another."""
        self.view_interval_s = view_interval_s
        """Changes of a view less than this apart are told together."""
        self.updates_per_s = updates_per_s
        """A leader sends about as many updates as this at most; large groups hear of changes less often."""
