"""What recipes share; a recipe that is copied takes this folder along."""
