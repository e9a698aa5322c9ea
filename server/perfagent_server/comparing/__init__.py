"""What differs between runs, or between two windows of one run."""
