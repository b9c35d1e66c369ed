"""Measuring a job: the probe as files for its machines, and what it wrote there as values."""
