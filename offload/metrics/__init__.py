"""What an engine did and what bounds it: counters, the account of each step, a timeline."""

from offload.metrics.counters import Metrics as Metrics
