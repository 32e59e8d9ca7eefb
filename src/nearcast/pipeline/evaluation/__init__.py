"""Recorded message events evaluated in Spark: latencies, violations, losses, excess data, downtime, throughput; and a report.

docs/guides/evaluating.md defines every figure.
"""

from nearcast.pipeline.evaluation.evaluation import Evaluation, EvaluationOptions, evaluate
from nearcast.pipeline.evaluation.places import Bound

__all__ = ["Bound", "Evaluation", "EvaluationOptions", "evaluate"]
