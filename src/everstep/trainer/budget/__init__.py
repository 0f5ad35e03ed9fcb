"""Memory and disk that a run will need: computed, checked, described."""
