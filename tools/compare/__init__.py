"""What two configurations, or two servers, say to the same prompts, position by position."""
