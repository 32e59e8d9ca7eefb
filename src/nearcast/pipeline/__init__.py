"""Topics as data: the Spark data source and sink, and the jobs that run on them. Needs ``nearcast[pipeline]``."""
