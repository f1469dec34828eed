"""Settings: what changes no weights and is applied when an artifact is opened; one file each."""
