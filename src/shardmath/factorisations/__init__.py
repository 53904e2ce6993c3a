"""Factorisations of dense matrices that are split over the ranks."""
