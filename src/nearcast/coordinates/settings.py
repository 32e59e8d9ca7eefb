"""How an agent learns its coordinate. Times are milliseconds of round trip."""

from __future__ import annotations

from nearcast.coordinates.coordinate import DIMENSIONS


class VivaldiSettings:
    """Vivaldi's constants (Dabek et al., SIGCOMM 2004), and those of what was added to it since."""

    def __init__(
        self,
        *,
        dimensions: int = DIMENSIONS,
        timestep: float = 0.25,
        error_timestep: float = 0.25,
        filter_samples: int = 3,
        adjustment_samples: int = 20,
        gravity_ms: float = 1_000.0,
        outlier_factor: float = 4.0,
        least_error: float = 0.05,
        max_rtt_ms: float = 10_000.0,
        max_peers: int = 256,
    ) -> None:
        self.dimensions = dimensions
        """Of the space, beside the height. Every node of a fabric needs the same. Two are enough for continents; more cost a
        few bytes a probe and make room for what is not on a map."""
        self.timestep = timestep
        """Vivaldi's c_c: which share of a wrong distance one sample may set right. Too low is slow, too high shakes."""
        self.error_timestep = error_timestep
        """Vivaldi's c_e: the same for the estimate of the own error."""
        self.filter_samples = filter_samples
        """Samples of one peer whose median counts (Ledlie et al., NSDI 2007). 1 takes every queue for a distance; with n, a
        route that changed is believed after n/2 + 1 samples."""
        self.adjustment_samples = adjustment_samples
        """Samples over which the adjustment is a mean (Lee et al., ToN 2010); 0 leaves it out."""
        self.gravity_ms = gravity_ms
        """The pull to the origin is (distance / this)² milliseconds a sample (Ledlie et al.): without it all nodes drift away
        together. Too low squeezes the space together."""
        self.outlier_factor = outlier_factor
        """A sample that is off by more milliseconds than so many times the median of what all peers' last samples were off by
        counts for no more than that: it is a liar's, or of a path that no space has room for. 0 believes everybody."""
        self.least_error = least_error
        """No peer is believed to be more certain of its coordinate than this."""
        self.max_rtt_ms = max_rtt_ms
        """Samples above, and coordinates farther out, are refused."""
        self.max_peers = max_peers
        """Peers whose samples are remembered."""
