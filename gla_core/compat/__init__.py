"""What eases the way from other libraries; nothing of theirs is imported."""
