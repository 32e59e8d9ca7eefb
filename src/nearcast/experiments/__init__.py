"""Experiments by name: each describes a deployment as data, runs the shipped code on it, and is held to bars it can miss."""

from nearcast.experiments.experiment import Bar, Bound, Experiment, Parameters, at_least, at_most, effective_parameters
from nearcast.experiments.run import Outcome, Run, perform

__all__ = [
    "Bar",
    "Bound",
    "Experiment",
    "Outcome",
    "Parameters",
    "Run",
    "at_least",
    "at_most",
    "effective_parameters",
    "perform",
]
