"""What methods share: local SGD settings, cohorts, the streamed Gram matrix, initial centers, momentum."""
