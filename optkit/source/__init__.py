"""Where models and texts come from, each pinned to a digest or a commit before anything runs."""
