"""Observation → tokens: images, proprioception, objects and text as one masked sequence, and what they refer to."""
