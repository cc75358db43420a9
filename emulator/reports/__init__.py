"""Results for people: pages, comparisons, plots and console tables."""
