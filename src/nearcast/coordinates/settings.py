"""How an agent learns its coordinate. Times are milliseconds of round trip."""

from __future__ import annotations

from nearcast.coordinates.coordinate import DIMENSIONS


class VivaldiSettings:
    """The defaults are what does best on the topologies of :mod:`nearcast.coordinates.topologies` (`nearcast experiment
    coordinates`)."""

    def __init__(
        self,
        *,
        dimensions: int = DIMENSIONS,
        timestep: float = 0.75,
        error_timestep: float = 0.25,
        filter_samples: int = 3,
        nearness: float = 1.5,
        coarseness: float = 0.2,
        tolerance: float = 0.15,
        outlier_factor: float = 2.0,
        adjustment_rate: float = 0.1,
        gravity_ms: float = 1_000.0,
        least_error: float = 0.05,
        record_rate: float = 0.25,
        noise_ms: float = 1.0,
        max_rtt_ms: float = 10_000.0,
        max_peers: int = 256,
    ) -> None:
        self.dimensions = dimensions
        """Of the space, beside the height. Every node of a fabric needs the same. Two are enough for continents; more cost a
        few bytes a probe and make room for what is not on a map."""
        self.timestep = timestep
        """Which share of the way to where its springs are at rest a node goes at each sample: others move, too. Too low is
        slow, above 1 two nodes may dance around each other."""
        self.error_timestep = error_timestep
        """Vivaldi's c_e: the same for the estimate of the own error."""
        self.filter_samples = filter_samples
        """Samples of one peer whose median counts (Ledlie et al., NSDI 2007). 1 takes every queue for a distance; with n, a
        route that changed is believed after n/2 + 1 samples."""
        self.nearness = nearness
        """A spring pulls with 1 / RTT to this power. 0, as in Vivaldi, makes absolute errors small, and near nodes, between
        which one has to choose, are misplaced for the sake of far ones; 2 makes relative errors small."""
        self.coarseness = coarseness
        """Springs below this share of a step's scale count as if they were that long. 0 lets near nodes hold each other fast,
        and sites stay where they began; at 1, near nodes find their places late and never quite."""
        self.tolerance = tolerance
        """How wrong a spring may be, as a share of the round-trip time, before it counts for less."""
        self.outlier_factor = outlier_factor
        """The same as a multiple of the median over all springs; the larger of both holds. Beyond, a spring is a liar's, or
        of a path that no space has room for. 0: all springs count alike."""
        self.adjustment_rate = adjustment_rate
        """How fast the adjustment follows what no height can say: that a node is nearer to all than space allows (Lee et al.,
        ToN 2010). 0 leaves it out."""
        self.gravity_ms = gravity_ms
        """The pull to the origin is (distance / this)² milliseconds a sample (Ledlie et al.): without it all nodes drift away
        together. Too low squeezes the space together."""
        self.least_error = least_error
        """No peer is believed to be more certain of its coordinate than this."""
        self.record_rate = record_rate
        """How fast a peer's record follows how well it fits: the error that it has at least, whatever it claims. 0 takes it at
        its word. Too low believes liars for long, too high forgets what they said last."""
        self.noise_ms = noise_ms
        """Differences below this are no distance, but the time that machines take. Round-trip times below count as this long
        when errors are compared."""
        self.max_rtt_ms = max_rtt_ms
        """Samples above, and coordinates farther out, are refused."""
        self.max_peers = max_peers
        """Peers whose springs are remembered."""
