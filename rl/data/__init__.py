"""Training data: sources of examples, datums, batches split over ranks, and packed rows."""
