"""What methods share: local SGD, server options, cohorts, updates, streamed Gram matrices, starts, momentum."""
