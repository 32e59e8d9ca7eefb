"""What brokers report of themselves and of the topics that are owned, and how many reports become one picture (ePulsar §3.2).
Pure: records and arithmetic."""
