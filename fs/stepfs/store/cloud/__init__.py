"""Google Cloud Storage (gs://) and Azure Blob Storage (az://), on obstore."""
