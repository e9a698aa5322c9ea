"""What a run records, written beside it for other programs to show."""
