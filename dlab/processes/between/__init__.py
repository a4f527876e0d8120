"""What the parent and its workers both know: messages, the control block, errors, and when to end."""
