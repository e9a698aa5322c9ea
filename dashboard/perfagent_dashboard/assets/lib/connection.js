// Whether the server has confirmed the page's subscription. Boards fetch history only after that, so they miss no sample.

export const connection = { isListening: false };
