"""Estimators in the manner of scikit-learn."""
