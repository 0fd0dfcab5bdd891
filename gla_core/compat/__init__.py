"""Helpers for users of other libraries; importing them imports none of those libraries."""
