"""What finished runs show: curves, comparisons, reports."""
