"""Memory that several processes see: how they wait for it to change, wake each other up, and lock it."""
