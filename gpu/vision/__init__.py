"""Images: a tower makes rows of their patches, and a decoder takes the rows for embeddings."""
