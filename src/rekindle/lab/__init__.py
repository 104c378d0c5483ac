"""The laboratory: streams, networks, training and studies that compare remedies fairly."""
