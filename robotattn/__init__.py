"""robotattn: attention policies, tabletop simulation and control-loop latency in one harness."""

__version__ = "0.1.0"
