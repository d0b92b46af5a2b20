"""Ready-made training configurations: a file says only what makes it that experiment, the rest are defaults."""
