"""Measurements that back the claims of the README; run from the root of the project."""
