"""`make demo`: a training job on a real cluster, a drain that waits for its save, and the timeline.

`stage` sets the scene (ground, chart, job), `observe` looks, `timeline` says what changed (pure),
`losses` compares two runs (pure). The end-to-end tests use the same modules.
"""
