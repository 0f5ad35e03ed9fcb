"""The state at one moment, found without walking through what has not changed."""
