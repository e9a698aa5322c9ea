// The boards that are up, by their element.

export const boards = new Map();
