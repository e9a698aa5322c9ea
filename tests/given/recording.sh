# A reader has recorded a training into FOLDER.
cp "$GIVEN/training.py" train.py
perfagent run --record FOLDER train.py
