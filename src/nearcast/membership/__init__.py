"""Who is alive and how far away: EMMA's monitoring packets, probing with an adaptive rate, failure detection."""
