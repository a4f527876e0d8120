"""What the parent and its workers share: messages, the control block, errors, and how processes end."""
