"""Real, small things that several test tiers share."""
