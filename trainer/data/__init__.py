"""From a data set's name to batches on the device."""
