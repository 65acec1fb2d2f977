"""The datasets of `actorium bench`: which requests a load is made of (`load.load_dataset`)."""
